"""OpenAI's responses: text and function tools."""
