"""The HTTP edge: OpenAI-compatible API, admin and cache routes, /metrics."""
