"""How a user asks: several wordings of each question.

The wordings differ in length on purpose: converse.py picks the one that brings a prompt to the length of its
batch.
"""

from __future__ import annotations

PHRASES: dict[str, list[str]] = {
    "complete": [
        "Complete this function.",
        "Complete this Python function:",
        "Please complete the following function.",
        "Write the rest of this function.",
        "Here is the start of a function. Write the rest of it.",
        "Finish this function for me, please:",
        "The body of this function is missing. Write it.",
        "This function is not finished yet. Please write the rest of its body.",
    ],
    "docstring": [
        "Write the docstring.",
        "Write a docstring for this function.",
        "Please write the docstring of this function:",
        "What does this function do?",
        "What does this do? Answer with a docstring.",
        "Document this function with a docstring.",
        "This function has no docstring. Write one for it, please.",
        "Say what this function does, in the form of a docstring.",
    ],
    "docs": [
        "Document {}.",
        "What is {}?",
        "Explain {}, please.",
        "Show me the documentation of {}.",
        "What does the documentation say about {}?",
        "Write the entry for {} in the documentation.",
        "I would like to read the documentation of {}.",
        "How is {} described in the Python documentation?",
    ],
    "continue": [
        "Continue.",
        "Continue this code:",
        "Continue this Python code, please.",
        "What comes next?",
        "Write the lines that come next.",
        "Here is some code. Write the next lines.",
        "Go on with this code up to a good place to stop.",
        "Please write the code that follows these lines:",
    ],
    "more": [
        "Go on.",
        "Go on, please.",
        "Continue.",
        "Write more.",
        "And then?",
        "What comes after that?",
        "Now write the lines that follow.",
        "Good. Please write the next part of it too.",
    ],
    "now docstring": [
        "Now its docstring.",
        "Now write its docstring.",
        "Now write the docstring.",
        "And what does it do?",
        "Please write a docstring for it now.",
        "Good. Now write a docstring for the function.",
        "Thanks. What would its docstring be?",
        "Now say what it does, as a docstring.",
    ],
    "now docs": [
        "And {}?",
        "Now {}.",
        "And what about {}?",
        "Now document {}.",
        "Next, explain {}.",
        "Good. Now show me {}.",
        "Thanks. What is {}, then?",
        "Now write the entry for {} too, please.",
    ],
}


def user_text(turn: dict, phrase: int) -> str:
    """The user's message for a turn in one of its wordings."""
    options = PHRASES[turn["ask"]]
    text = options[phrase % len(options)]
    if "{}" in text:
        return text.format(turn["subject"])
    if not turn["subject"]:
        return text
    code = f"```python\n{turn['subject']}\n```" if turn["fenced"] else turn["subject"]
    return f"{text}\n\n{code}"
