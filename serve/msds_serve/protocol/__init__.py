"""OpenAI's protocol as data: requests checked, responses and streams written. No HTTP and no engine."""
