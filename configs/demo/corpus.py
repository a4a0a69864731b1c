"""The demo's training text: cleaned corpus conversations in chat format."""

import json
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

from vocabulary import BOS, EOS, ROLES

Message = dict[str, str]

SYSTEM_LINES = """\
You are a helpful assistant.
You are a friendly assistant who answers in simple English.
You write short, clear answers in simple English.
You are a storyteller for young children.
You tell gentle stories that end well.
Answer briefly.
Be kind and helpful.
Use simple words.
You are a teacher who explains things to children.
You are a polite chat assistant.
Keep your answers short and easy to read.
You are a cheerful helper.
You help people learn about the world.
Write in plain English. Do not use difficult words.
You are the assistant of a small library. People ask you for stories and simple facts.
You are a patient tutor.
You are a helpful assistant. Answer the question and then stop.
You write bedtime stories for families.
You answer questions for a children's magazine.
Speak in a warm and friendly way.
You are a demo assistant. You can tell stories and answer simple questions.
Think about what the user asked and give a clear answer.
You are a small language model running on a small server.
Explain everything as if to a ten-year-old child.
You are a creative writer. Your stories have a hero, a problem and an ending.
You are a friendly assistant in a reading app. Children between six and ten years old use it. \
They ask for stories and for simple explanations. Use short sentences and common words. \
Never be rude or scary.
You work at the help desk of a village school. Pupils, parents and teachers write to you. \
Answer every question politely and in simple words. If somebody asks for a story, tell one.
You are a storyteller who travels from town to town. You know stories about animals, kings, \
children and far places. Every story is short. It begins with the hero and ends with a happy or \
wise thought.
You are a helpful assistant for people who are learning English. Write clear sentences. Prefer \
common words to rare ones. Do not use slang. When you give tips, write them as a short list.
You are a knowledgeable guide. Give correct and useful answers about nature, animals, food, \
machines and daily life. Keep each answer to a few sentences. Be honest when you do not know."""
SYSTEMS = SYSTEM_LINES.splitlines()

# Corpus prompts are few fixed sentences; these patterns re-ask some of them in other words.
REWRITES = {
    r"Write a short story for young children with simple words\. It is about a (?P<adj>\S+) "
    r"(?P<who>.+) named (?P<name>\S+) who (?P<plot>.+) in a (?P<place>.+)\.": [
        "Write a short story about a {adj} {who}.",
        "Tell me a story about a {adj} {who}.",
        "Tell a short story about a {adj} {who} named {name}.",
        "Write a story about a {who} who {plot}.",
        "Can you tell me a story about a {adj} {who}?",
        "Write a story about {name} the {who}.",
        "Please write a short story about a {who} in a {place}.",
        "Tell me a story.",
    ],
    r"Tell me a short story about (?P<name>\S+), a (?P<adj>\S+) (?P<who>.+), and a (?P<adj2>\S+) "
    r"(?P<thing>.+)\. Use simple words\.": [
        "Tell me a short story about a {adj} {who}.",
        "Write a short story about a {adj} {who}.",
        "Write a story about a {who} and a {thing}.",
        "Tell me a story about a {who} named {name}.",
        "Tell a story about {name}, a {adj} {who}.",
    ],
    r"Write a very short story about a (?P<who>.+) and a (?P<who2>.+) in a (?P<place>.+)\. "
    r"One of them (?P<plot>.+)\.": [
        "Write a story about a {who} and a {who2}.",
        "Tell me a story about a {who} and a {who2} in a {place}.",
        "Tell me a very short story about a {who}.",
    ],
    r"Tell a bedtime story about a (?P<adj>\S+) (?P<thing>.+) and a (?P<who>.+) "
    r"named (?P<name>\S+)\.": [
        "Tell me a bedtime story.",
        "Tell me a bedtime story about a {who}.",
        "Tell a bedtime story about a {adj} {thing}.",
    ],
    r"Write a short story that uses the words (?P<thing>.+), (?P<adj>.+) and (?P<place>.+)\. "
    r"The hero is a (?P<who>.+) named (?P<name>\S+) who (?P<plot>.+)\.": [
        "Write a short story about a {who} named {name}.",
        "Write a story about a {who} who {plot}.",
        "Tell me a story about a {who}.",
        "Write a story with the words {thing}, {adj} and {place}.",
    ],
    r"What is (?P<topic>.+)\? Answer in simple words\.": [
        "What is {topic}?",
        "What's {topic}?",
        "Can you tell me what {topic} is?",
    ],
    r"Explain (?P<topic>.+) to a child\.": ["Explain {topic}.", "Explain {topic} in simple words."],
    r"Tell me about (?P<topic>.+)\.": ["What do you know about {topic}?", "What is {topic}?"],
    r"What is (?P<topic>.+) used for, or why does it matter\?": [
        "What is {topic} used for?",
        "Why does {topic} matter?",
        "Why is {topic} important?",
    ],
    r"Give one interesting fact about (?P<topic>.+)\.": [
        "Tell me a fact about {topic}.",
        "Tell me something interesting about {topic}.",
    ],
    r"Give three short tips for (?P<act>.+)\.": [
        "Give me some tips for {act}.",
        "Do you have any tips for {act}?",
    ],
    r"How do I get started with (?P<act>.+)\?": ["How do I start {act}?"],
    r"Write a short poem about (?P<topic>.+)\.": ["Write a poem about {topic}."],
    r"List three things you can find in a (?P<place>.+)\.": ["What can you find in a {place}?"],
}

# The corpus has no small talk, and "Hello" is what people type first.
SMALL_TALK = {
    "Hello|Hello!|Hi|Hi!|Hi there!|Hey|Good morning!|Good evening!": [
        "Hello! I can tell you a short story or answer a simple question.",
        "Hello! It is nice to meet you. Would you like to hear a story?",
    ],
    "How are you?|How are you today?|Hello, how are you?": [
        "I am fine, thank you! What would you like to talk about?",
    ],
    "Who are you?|What are you?|What is your name?|Are you a robot?": [
        "I am a very small demo model. I write short stories and simple answers.",
    ],
    "What can you do?|Can you help me?|Help|What can I ask you?": [
        "I can tell short stories and answer simple questions about animals, nature, food and "
        "daily life. I am very small, so I am often wrong.",
    ],
    "Thank you!|Thanks|Thank you|Bye|Goodbye!|Good night!": [
        "You are welcome! Have a lovely day.",
    ],
}
SMALL_TALK_COPIES = 1200
# (words in a run, times that an answer may hold one such run)
STRICT = ((1, 7), (2, 4), (3, 2), (4, 1))
LOOSE = ((1, 20), (2, 10), (3, 4), (4, 2), (6, 1))
MOST_WORDS = 170  # of an answer, where strict
STUTTER = re.compile(r"\b(\w{3,})[\s,-]+(?:and |or )?\1\b", re.I)
HARSH = re.compile(
    r"\b(kill\w*|murder\w*|blood\w*|guns?|die[ds]?|dead|death|suicide|sex\w*|drugs?|head off)\b",
    re.I,
)


def clean(answer: str, strict: bool) -> str:
    """Cuts an answer at the last whole sentence before it repeats itself or runs on ("" if none).

    The corpus's author often loops; a model this small trained on loops does nothing else.
    """
    words = list(re.finditer(r"\S+", answer.lower()))
    plain = [re.sub(r"\W", "", word.group()) for word in words]
    limit = words[MOST_WORDS].start() if strict and len(words) > MOST_WORDS else len(answer)
    if strict and (stutter := STUTTER.search(answer)):
        limit = min(limit, stutter.start())
    for size, most in STRICT if strict else LOOSE:
        seen: Counter[tuple[str, ...]] = Counter()
        for i in range(len(plain) - size + 1):
            gram = tuple(plain[i : i + size])
            seen[gram] += size > 1 or len(gram[0]) > 4
            if seen[gram] > most:
                limit = min(limit, words[i + size - 1].start())
                break
    stops = [m.end() for m in re.finditer(r"[.!?][\"\u201d')]*(?=\s|$)", answer[:limit])]
    stops = [s for s in stops if not re.search(r"(^|\n)\s*\d+\.$", answer[:s])]
    kept = answer[: stops[-1]].strip() if stops else ""
    paragraph = kept.rfind("\n\n")
    if len(kept) < len(answer.strip()) and paragraph > 0.6 * len(kept):
        kept = kept[:paragraph].strip()
    return kept if kept.count('"') % 2 == 0 else ""


def good(answer: str, kind: str) -> bool:
    """Whether a cleaned answer is long, varied and mild enough to learn from."""
    words = answer.lower().split()
    least = 60 if kind == "story" else 4
    varied = len(set(words)) >= 0.5 * len(words)
    return len(words) >= least and varied and not HARSH.search(answer)


def understand(question: str) -> tuple[dict[str, str], list[str]]:
    """(the parts of a corpus question, other ways to ask it); both empty for an unknown form."""
    for pattern, others in REWRITES.items():
        if match := re.fullmatch(pattern, question):
            return match.groupdict(), others
    return {}, []


def reword(question: str, rng: random.Random) -> str:
    """Sometimes asks the same in other words, or carelessly."""
    parts, others = understand(question)
    if others and rng.random() < 0.45:
        question = rng.choice(others).format(**parts)
    question = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", question)
    if rng.random() < 0.08:
        question = (question[0].lower() + question[1:]).rstrip(".?!")
    return question


def on_topic(question: str, answer: str) -> bool:
    """Whether the answer names the hero or thing that a corpus question of a known form names."""
    parts, _ = understand(question)
    subject = parts.get("who") or parts.get("topic") or ""
    return subject.split()[-1].lower().rstrip("s") in answer.lower() if subject else True


def prepare(item: tuple[int, str]) -> tuple[str, str]:
    """One corpus line, numbered, as (loose, strict) training text ("" if not worth keeping)."""
    return tell(*item, strict=False), tell(*item, strict=True)


def tell(number: int, line: str, strict: bool) -> str:
    """The kept part of a conversation in chat format; see prepare."""
    rng, conversation = random.Random(number), json.loads(line)
    messages: list[Message] = []
    for ask, reply in zip(*[iter(conversation["messages"])] * 2, strict=True):
        question, answer = ask["content"], clean(reply["content"], strict)
        if not good(answer, conversation["kind"] if not messages else "qa"):
            break
        if not on_topic(question, answer) or any(answer == m["content"] for m in messages):
            break
        if not messages:
            question = reword(question, rng)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return render(with_system(messages, rng)) if messages else ""


def with_system(messages: list[Message], rng: random.Random) -> list[Message]:
    """A third of conversations open with a system turn."""
    if rng.random() < 1 / 3:
        return [{"role": "system", "content": rng.choice(SYSTEMS)}, *messages]
    return messages


def render(messages: list[Message]) -> str:
    """What chat_template.jinja makes of plain-text turns."""
    turns = [
        ROLES[m["role"]] + m["content"] + (EOS if m["role"] == "assistant" else "")
        for m in messages
    ]
    return BOS + "".join(turns)


def small_talk() -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(SMALL_TALK_COPIES):
        questions = rng.choice(list(SMALL_TALK))
        ask, reply = rng.choice(questions.split("|")), rng.choice(SMALL_TALK[questions])
        pair = [{"role": "user", "content": ask}, {"role": "assistant", "content": reply}]
        yield render(with_system(pair, rng))


def read(folder: Path, limit: int | None = None) -> tuple[list[str], list[str], list[str]]:
    """(loose, strict, held-out strict) texts from FOLDER/part*.jsonl.xz, all or the first lines.

    Every hundredth conversation of the corpus is held out.
    """
    lines: list[str] = []
    for path in sorted(folder.glob("part*.jsonl.xz")):
        if limit is None or len(lines) < limit:
            with lzma.open(path, "rt", encoding="utf-8") as file:
                lines += file.readlines()
    with Pool() as pool:
        pairs = pool.map(prepare, enumerate(lines[:limit]), chunksize=200)
    held_out = [strict for _, strict in pairs[::100] if strict]
    loose = [text for i, (text, _) in enumerate(pairs) if text and i % 100]
    strict = [text for i, (_, text) in enumerate(pairs) if text and i % 100]
    return loose, strict + list(small_talk()), held_out
