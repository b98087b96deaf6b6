"""The pretend cards of the tests and benchmarks: those of the shipped profiles, as their tables [card] describe them."""

from hwopt.config.profile import load_profile
from hwopt.config.profile_files import profile_files


def shipped_cards() -> dict[str, str]:
    """Profile -> "NAME:COMPUTE CAPABILITY:MIB[:MULTIPROCESSORS]" of its card.

    The part before "_" is the one with the most memory: "a100".
    """
    cards = [(name, load_profile(name, profile_files()).card) for name in profile_files()]
    found = {}
    for name, card in sorted(cards, key=lambda pair: pair[1].memory_gib or 0.0):
        if card.compute_capability and card.memory_gib and not card.amd:
            device = card.match[0] if card.match[0].startswith(("NVIDIA", "Tesla")) else f"NVIDIA {card.match[0]}"
            text = f"{device}:{card.compute_capability}:{round(1024 * card.memory_gib)}"
            text += f":{card.multiprocessors}" if card.multiprocessors else ""
            found |= {name: text, name.partition("_")[0]: text}
    return found


CARDS = shipped_cards()


def cards_of(text: str) -> str:
    """The cards of a comma-separated list, in which each entry is a name of CARDS or itself such a text.

    Raises ValueError for an entry that is neither.
    """
    found = []
    for entry in text.split(","):
        card = CARDS.get(entry, entry)
        if card.count(":") not in (2, 3):
            form = "NAME:COMPUTE CAPABILITY:MIB[:MULTIPROCESSORS]"
            raise ValueError(f"unknown pretend card {entry!r}: expected {form} or one of {', '.join(CARDS)}")
        found.append(card)
    return ",".join(found)
