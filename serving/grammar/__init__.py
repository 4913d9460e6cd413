"""Grammars that a model's text has to fit: JSON schemas, regular expressions, choices, tools."""
