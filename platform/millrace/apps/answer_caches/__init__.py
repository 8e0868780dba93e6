"""The answer cache, the semantic cache and the prefix cache: their keys, evidence, reports and warming."""
