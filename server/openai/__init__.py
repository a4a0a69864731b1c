"""OpenAI's wire format: requests, responses, streams."""
