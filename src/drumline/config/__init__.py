"""The recipe: fields and their limits, the tables of layouts and sources, rules, TOML files, command lines."""
