"""Prompts of the live requests. The instructions are long enough to be cached."""

from __future__ import annotations

INSTRUCTIONS = {
    "demo-harbor": (
        "You are the assistant of a bookshop by the sea. Customers ask about books, opening hours and deliveries. "
        "Answer in two or three short sentences. Name at most two titles at a time, and say why each may please. "
        "If you do not know whether a book is in stock, say that the shop will look and write back the same day. "
        "The shop opens at nine and closes at six; on Sundays it is shut. Parcels leave on Tuesdays and Fridays."
    ),
    "demo-lantern": (
        "You help the reception of a small clinic to sort notes. You give no medical advice. Sum each note up in one "
        "sentence, name what the caller wants, and say which desk should call back: appointments, letters or the "
        "nurse on duty. If a note sounds urgent, begin with the word URGENT. Never guess at names or dates; leave out "
        "what the note does not say, and keep every answer below sixty words."
    ),
    "demo-copper": (
        "You write lines for the people of a village in a game. It has a mill, an inn with a copper kettle over the "
        "door, and a forest that people avoid after dark. Each villager speaks plainly, in at most two sentences, and "
        "never knows that they are in a game. Keep to the village: no cities, no machines, no modern words. A touch "
        "of humor is welcome; cruelty is not."
    ),
    "demo-meadow": (
        "You read abstracts for a group that studies grassland. Say in three sentences what was measured, how, and "
        "what came out. Use plain words, keep units as they are given, and do not judge whether the result is right. "
        "If an abstract names no number, say so. End with one question that the next reader should ask."
    ),
}
QUESTIONS = {
    "demo-harbor": (
        "Can you suggest a calm novel for a long train ride?",
        "My daughter is nine and loves whales. What could she read?",
        "Do you post to the islands, and how long does it take?",
        "I liked a story about a lighthouse keeper. What next?",
        "Is there a good first book about knots?",
        "When are you open this weekend?",
        "I need a present for a friend who cooks too much.",
        "Which poems are short enough to read aloud at a wedding?",
    ),
    "demo-lantern": (
        "Note: called at ten, wants to move the check-up to the week after next, mornings only.",
        "Note: asks for a copy of the letter to the employer, by post.",
        "Note: mother of a boy with a rash since yesterday, no fever, asks what to watch for.",
        "Note: dizzy when standing up, since the new tablets, sounds worried.",
        "Note: thanks for the quick answer, no call needed.",
        "Note: new address, the old one is still on the last bill.",
    ),
    "demo-copper": (
        "The miller, when asked why the wheel does not turn.",
        "The innkeeper, to a stranger who orders tea.",
        "A child who has lost a goose.",
        "The smith, on the forest after dark.",
        "An old woman who has seen lights between the trees.",
        "The baker, early in the morning and in a bad mood.",
    ),
    "demo-meadow": (
        "Abstract: over six summers, plots mown once a year held 31 species, plots mown three times 19.",
        "Abstract: soil under old hedges kept 12 % more water in the dry weeks than open soil ten metres away.",
        "Abstract: bees visited patches with four flowering plants more often than larger patches with one.",
        "Abstract: after a mild winter the first larks sang nine days earlier than the mean of twenty years.",
        "Abstract: interviews with shepherds describe which paths the flocks choose, and why they change.",
    ),
}
