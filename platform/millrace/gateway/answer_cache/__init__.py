"""The answer cache: answers of earlier, equal requests of the same tenant."""
