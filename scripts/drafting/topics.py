"""Everyday requests: a task put to a topic, which is enough for a chat model to write answers of many kinds."""

from __future__ import annotations

import itertools
import random

_TASKS = (
    "Explain {} to a ten-year-old.",
    "What are the main advantages and disadvantages of {}?",
    "Write a short story about {}.",
    "Write a formal email to a colleague about {}.",
    "Give me five tips on {}.",
    "Summarize what people should know about {} in three sentences.",
    "Write a poem about {}.",
    "Compare two different views on {}.",
    "What is the history of {}?",
    "Write a blog post introduction about {}.",
    "Describe {} in vivid detail.",
    "List ten words related to {} and explain each of them.",
    "Imagine that you are an expert on {}. How would you answer a beginner's first question?",
    "Write a dialogue between two friends who talk about {}.",
    "How would you plan a lesson about {}?",
    "What could go wrong with {}, and how can it be prevented?",
    "Write a Python function that has something to do with {} and explain it.",
    "Make a table of facts about {}.",
    "Write a product description that mentions {}.",
    "Argue for more public money for {}.",
    "What questions should a journalist ask about {}?",
    "Translate this into simple English and go on: {} changes how we live.",
    "Solve step by step: a shop sells things for {}. 12 cost 36 dollars. How much do 20 cost?",
    "Give a recipe or instructions, step by step, for something with {}.",
)
_TOPICS = (
    "bicycles, the ocean, vegetable gardens, solar power, chess, railways, honey bees, the moon, old maps, libraries, "
    "bread, city parks, rivers, wool, violins, cameras, glaciers, elections, markets, vaccines, bridges, volcanoes, "
    "coffee, sleep, running, robots, birds, insurance, theatre, dictionaries, earthquakes, cheese, swimming, forests, "
    "computers, friendship, taxes, paper, school lunches, recycling, sailing, deserts, painting, batteries, football, "
    "tea, trains at night, mountains, bookshops, hospitals, dogs, winter, clocks, public transport, oil, dancing, "
    "remote work, rice, museums, weather forecasts, cats, the stock market, whales, grammar, satellites, kitchens"
).split(", ")


def requests(count: int, seed: int = 0) -> list[str]:
    """Different requests in a random order. ValueError for more than there are."""
    all_of_them = [task.format(topic) for task, topic in itertools.product(_TASKS, _TOPICS)]
    if count > len(all_of_them):
        raise ValueError(f"asked: got {count}, takes at most {len(all_of_them)}")
    random.Random(seed).shuffle(all_of_them)
    return all_of_them[:count]
