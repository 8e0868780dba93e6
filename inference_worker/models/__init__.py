"""Model sources and loaders: Hugging Face directories, safetensors and GGUF files."""
