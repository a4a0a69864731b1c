"""OpenAI's responses API, without stored state: POST /v1/responses."""
