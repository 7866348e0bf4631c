# SPDX-License-Identifier: Apache-2.0
"""Numbers of classes that some clients seem to count from 0 and others from 1."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from perada.core.text import abbreviated


@dataclass(frozen=True)
class ShiftedNumbers:
    """Clients whose numbers of classes look like those of others plus 1.

    Attributes:
        numbers: The numbers of the others.
        higher_numbers: The same numbers plus 1.
        client_names: Clients that have the smallest of all numbers.
        higher_client_names: Clients that have the largest of all numbers.
    """

    numbers: list[int]
    higher_numbers: list[int]
    client_names: list[str]
    higher_client_names: list[str]

    def describe(self, confirmation: str) -> str:
        """Return a sentence with the remedy; ``confirmation`` is what to do if the classes are different ones."""
        higher_clients = abbreviated(self.higher_client_names)
        return (
            f"the classes {_list_numbers(self.higher_numbers)} of {higher_clients} look like the classes "
            f"{_list_numbers(self.numbers)} of {abbreviated(self.client_names)} plus 1: number each class alike at all "
            f"clients, here by subtracting 1 from each label of {higher_clients}; if they are different classes, "
            f"{confirmation}"
        )


def _list_numbers(numbers: list[int]) -> str:
    """Return the first numbers for a message."""
    return abbreviated([str(number) for number in numbers])


def find_shifted_numbers(numbers_of_clients: Mapping[str, Set[int]]) -> ShiftedNumbers | None:
    """Find clients whose numbers of classes look like those of other clients plus 1; None if there are none.

    They do if some client has certain numbers, another one has exactly these plus 1, and none has both the smallest and
    the largest number. Clients may have only some of the numbers, so a client with both shows that there are that many
    classes.

    Args:
        numbers_of_clients: The numbers of each client, by its name in messages.

    >>> find_shifted_numbers({"a": {0, 1}, "b": {1, 2}, "c": {1}})
    ShiftedNumbers(numbers=[0, 1], higher_numbers=[1, 2], client_names=['a'], higher_client_names=['b'])
    >>> find_shifted_numbers({"a": {0, 1}, "b": {1, 2}, "c": {0, 2}}) is None
    True
    """
    numbers_in_use = [numbers for numbers in numbers_of_clients.values() if numbers]
    if not numbers_in_use:
        return None
    smallest = min(min(numbers) for numbers in numbers_in_use)
    lower = max((numbers for numbers in numbers_in_use if smallest in numbers), key=len)
    higher = {number + 1 for number in lower}
    largest = max(higher)
    overlap = lower & higher
    if not overlap or not any(numbers == higher for numbers in numbers_in_use):
        return None
    if not all(numbers <= lower or numbers <= higher for numbers in numbers_in_use):
        return None
    return ShiftedNumbers(
        numbers=sorted(lower),
        higher_numbers=sorted(higher),
        client_names=[client for client, numbers in numbers_of_clients.items() if smallest in numbers],
        higher_client_names=[client for client, numbers in numbers_of_clients.items() if largest in numbers],
    )
