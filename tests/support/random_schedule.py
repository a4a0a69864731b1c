"""One random schedule from a seed: pool, limits, policy, requests, aborts, failures, flushes."""

from __future__ import annotations

from random import Random

from support.scheduler_sim import VOCAB, Simulation


def random_simulation(rng: Random) -> Simulation:
    page_size = rng.choice([1, 4, 16])
    num_pages = max(3, rng.choice([48, 96, 192]) // page_size)
    return Simulation(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=rng.choice([1, 4, 8, 8]),
        max_num_batched_tokens=rng.choice([2, 7, 32, 200]),
        policy=rng.choice(["fcfs", "lpm", "priority"]),
        max_retractions=rng.choice([0, 1, 4]),
        eos_ids=frozenset({3, 17}) if rng.random() < 0.5 else frozenset(),
        commit_every=rng.choice([1, 5, 256]),
        max_skips=rng.choice([0, 2, 16]),
        min_reserve_steps=rng.choice([0, 0, 1, 8]),
        min_in_common=rng.choice([1, 8, 32]),
        enable_prefix_cache=rng.random() < 0.9,
        step_s=rng.choice([0.01, 1.0, 30.0]),  # 30: the age bound of waiting passes
    )


def pressed_simulation(rng: Random) -> Simulation:
    """No room is left for growth, so that the pool runs out again and again."""
    page_size = rng.choice([1, 4, 16])
    return Simulation(
        num_pages=rng.choice([64, 128]) // page_size,
        page_size=page_size,
        max_num_batched_tokens=rng.choice([16, 200]),
        policy=rng.choice(["fcfs", "lpm", "priority"]),
        max_retractions=rng.choice([0, 1, 2, 4]),
        min_reserve_steps=0,
    )


def submit_random(sim: Simulation, rng: Random, families: list[list[int]], number: int) -> None:
    prefix = rng.choice(families)[: rng.randrange(0, 41)]
    prompt = prefix + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
    limit = sim.limits.max_model_len
    prompt = prompt[: limit - 1]
    sim.submit(
        f"r{number}",
        prompt,
        min(rng.choice([3, 12, 40]), limit - len(prompt)),
        n=rng.choice([1, 1, 1, 1, 2, 3]),
        store=rng.random() > 0.1,
        priority=rng.randrange(3),
        namespace=rng.choice(["", "", "other"]),
        ignore_eos=rng.random() < 0.3,
        prompt_logprobs=rng.choice([None, None, None, 0]),
    )


def run_random(seed: int) -> Simulation:
    """Runs one schedule to its end; the simulation checks every promise on the way."""
    rng = Random(seed)
    is_pressed = rng.random() < 0.25
    sim = pressed_simulation(rng) if is_pressed else random_simulation(rng)
    families = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    num_requests, number = rng.randrange(8, 12) if is_pressed else rng.randrange(1, 14), 0
    while number < num_requests or sim.scheduler.has_work:
        if number < num_requests and rng.random() < 0.7:
            submit_random(sim, rng, families, number)
            number += 1
        if number and rng.random() < 0.06:
            reason = rng.choice(["abort", "stop"])
            sim.abort(f"r{rng.randrange(number)}", rng.choice([None, 0, 1]), reason)
        if sim.scheduler.running and rng.random() < 0.03:
            victim = rng.choice(sim.scheduler.running)
            sim.fail_next(victim.request_id, victim.index)
        if rng.random() < 0.02:
            sim.cache.flush(rng.choice([None, "other"]))
        assert sim.num_steps < 3000, sim.scheduler.num_waiting()
        sim.step()
        sim.failing.clear()
    sim.check_outcomes()
    return sim
