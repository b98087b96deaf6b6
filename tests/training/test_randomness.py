import torch
from hypothesis import given
from hypothesis import strategies as st

from hwopt.training.randomness import DROPOUT, UPDATE, mix, reseeder, shuffled

number = st.integers(0, 2**63 - 1)


def test_mix_depends_on_every_bit_of_the_place() -> None:
    flips = [bin(mix(7, 1, 1 << bit) ^ mix(7, 1, 0)).count("1") for bit in range(63)]
    assert min(flips) >= 12  # of 63; the mean is half of them


@given(st.integers(0, 300), number, st.integers(0, 50))
def test_order_is_a_permutation_fixed_by_seed_and_epoch(samples: int, seed: int, epoch: int) -> None:
    order = shuffled([1] * samples, seed, epoch)
    assert sorted(order) == list(range(samples))
    assert (order == shuffled([1] * samples, seed, epoch)).all()
    assert samples < 20 or (order != shuffled([1] * samples, seed, epoch + 1)).any()


def test_dropout_depends_only_on_step_and_sample() -> None:
    reseed = reseeder(torch.device("cpu"), 3)

    def drawn(step: int, sample: int) -> torch.Tensor:
        reseed(step, sample)
        return torch.nn.functional.dropout(torch.ones(64))

    first = drawn(5, 17)
    torch.rand(9)
    assert torch.equal(drawn(5, 17), first)
    assert not torch.equal(drawn(6, 17), first)
    assert not torch.equal(drawn(5, 18), first)


def test_update_depends_only_on_the_step_and_shares_no_numbers_with_dropout() -> None:
    def drawn(seed: int, purpose: int, *place: int) -> torch.Tensor:
        reseeder(torch.device("cpu"), seed, purpose)(*place)
        return torch.rand(8)

    first = drawn(3, UPDATE, 5)
    assert torch.equal(drawn(3, UPDATE, 5), first)
    for other in (drawn(3, UPDATE, 6), drawn(4, UPDATE, 5), drawn(3, DROPOUT, 5), drawn(3, DROPOUT, 5, 0)):
        assert not torch.equal(other, first)
