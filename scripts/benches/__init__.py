"""The benchmark's subcommands, and what they share: prompts, statistics, output and schemas."""
