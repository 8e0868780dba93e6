"""OpenAI's Responses API: text and function tools."""
