from __future__ import annotations

import torch

from treeverify.integrations.sglang.host_copy import HostCopy


class Arrival:
    """Stands for the event of a copy."""

    def __init__(self) -> None:
        self.complete = False

    def query(self) -> bool:
        return self.complete


def test_the_newest_complete_copy_is_read_and_now_reads_the_source() -> None:
    source = torch.tensor([1, 2])
    copy = HostCopy(source)
    assert copy.latest().tolist() == [0, 0]
    copy.start()
    source.add_(10)
    assert copy.latest().tolist() == [1, 2]
    assert copy.now().tolist() == [11, 12]


def test_a_copy_under_way_is_neither_read_nor_overwritten() -> None:
    source = torch.tensor([1, 2])
    copy = HostCopy(source)
    copy.start()
    arrival = Arrival()
    copy._arriving.copy_(torch.tensor([3, 4]))
    copy._event = arrival
    source.fill_(9)
    copy.start()
    assert copy.latest().tolist() == [1, 2]
    arrival.complete = True
    assert copy.latest().tolist() == [3, 4]
    copy.start()
    assert copy.latest().tolist() == [9, 9]
