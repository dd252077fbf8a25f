"""The step on an exact toy pair: whatever is drafted, texts are the oracle's, and every row is in its place."""

from __future__ import annotations

import pytest
import torch
from tests.step.toy_host import Request, ToyHost
from tests.toy.models import VOCAB, ToyDrafter, oracle

from treeverify.engine.request import SamplingParams
from treeverify.ops.tree_accept.api import tree_accept
from treeverify.ops.tree_accept.contract import NO_TOKEN
from treeverify.ops.tree_build.api import tree_build
from treeverify.step.plain import RUN, Chains, run_of
from treeverify.step.step import Step

NEW = 30
GREEDY = SamplingParams(max_new_tokens=NEW + 12, stop_token_ids=())
DRAWN = [
    SamplingParams(temperature=1.0, seed=7, max_new_tokens=NEW + 12, stop_token_ids=()),
    SamplingParams(temperature=0.8, top_k=3, seed=7, max_new_tokens=NEW + 12, stop_token_ids=()),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.05, seed=2**62 + 9, max_new_tokens=NEW + 12, stop_token_ids=()),
]
LAWS = {"greedy": [GREEDY] * 3, "drawn": DRAWN, "both": [GREEDY, *DRAWN[1:]]}
PROMPTS = [[3, 4, 5], list(range(2, 20)), [9] * 7]
EVENTS = [
    "open", "draft", "spent draft", "verify", "spent verify", "spent accept", "publish", "append", "spent commit",
    "result",
]  # fmt: skip
PLAIN_EVENTS = ["open", "spent draft", *["verify", "spent verify", "spent accept"] * 3, *EVENTS[-4:]]


def made(laws: list[SamplingParams], drafter: ToyDrafter | None = None, width: int = 9, **options):
    """A host, its step, and requests that have their first token."""
    host = ToyHost(drafter or ToyDrafter(), width)
    requests = [Request(list(prompt), law) for prompt, law in zip(PROMPTS, laws, strict=False)]
    host.start(requests)
    return host, Step(host, host.block, host.spent, **options), requests


def right_so_far(request: Request) -> bool:
    return request.text == request.right[: len(request.text)]


@pytest.mark.parametrize("laws", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("width", [1, 2, 4, 9])
def test_texts_are_the_oracles(laws, width):
    host, step, requests = made(laws)
    host.wanted = width
    while max(len(request.text) - len(request.prompt) for request in requests) < NEW:
        host.run(step, requests)
        assert all(map(right_so_far, requests)), [request.text for request in requests]
        assert host.events == EVENTS
        assert host.published[-1] == [len(request.text) - 1 for request in requests]
        assert host.outcomes[-1].width == host.outcomes[-1].trees.tokens.shape[1] == width
    lengths = torch.stack([outcome.accepted.lengths for outcome in host.outcomes]).float()
    assert (lengths.mean() > 1.2) == (width > 1), "drafts were not used"
    moved = [outcome.accepted.path for outcome in host.outcomes]
    assert width < 9 or any((path > torch.arange(path.shape[1])).any() for path in moved), "no row had to move"


@pytest.mark.parametrize("laws", LAWS.values(), ids=LAWS)
def test_runs_of_plain_steps_between_trees(laws):
    host, step, requests = made(laws)
    for turn in range(6):
        host.run(step, requests, run=(0, 3, 1)[turn % 3])
        assert all(map(right_so_far, requests))
        assert host.published[-1] == [len(request.text) - 1 for request in requests]
        assert turn % 3 != 1 or host.events == PLAIN_EVENTS
    lengths = [outcome.accepted.lengths.tolist() for outcome in host.outcomes]
    assert lengths[1::3] == [[3] * 3] * 2
    assert lengths[2::3] == [[1] * 3] * 2


def test_a_batch_changes_no_text_and_no_number():
    """Requests with one seed and prompt draw alike, with another seed otherwise, alone or not."""
    laws = [DRAWN[0], SamplingParams(temperature=1.0, seed=8, max_new_tokens=NEW + 12, stop_token_ids=())]
    texts = []
    for chosen in ([laws[0]], [laws[1], laws[0]]):
        host = ToyHost(ToyDrafter(), 9)
        requests = [Request([3, 4, 5], law) for law in chosen]
        host.start(requests)
        step = Step(host, host.block, host.spent)
        while len(requests[-1].text) < NEW:
            host.run(step, requests)
        texts.append([request.text[:NEW] for request in requests])
    assert texts[0][-1] == texts[1][-1]
    assert texts[1][0][: len(texts[1][0])] != texts[1][1][: len(texts[1][0])]


def test_padding_is_nobodys_child():
    """Two drafted nodes and six of padding, whose token is the root's; the target repeats the root."""
    host, step, requests = made([GREEDY] * 3)
    stock = host.verify

    def repeats(batch, window, ids, masks):
        verified = stock(batch, window, ids, masks)
        verified.logits.view(len(batch), -1, VOCAB)[torch.arange(len(batch)), :, ids[:, 0]] = 1e3
        return verified

    roots = torch.tensor([request.text[-1] for request in requests])
    drafted = torch.stack([(roots + 1) % VOCAB, (roots + 2) % VOCAB], -1).unsqueeze(1)
    log_probs = torch.tensor([-0.5, -1.0]).expand(3, 1, 2).contiguous()
    host.draft = lambda batch, window: tree_build(log_probs, drafted, roots, budget=8)
    host.verify = repeats
    host.run(step, requests)
    (outcome,) = host.outcomes
    assert outcome.trees.widths.tolist() == [3] * 3
    assert outcome.accepted.lengths.tolist() == [1] * 3
    assert [request.text[-2:] for request in requests] == [[root] * 2 for root in roots.tolist()]


def test_who_accepts_instead_of_the_target_gets_its_tokens():
    seen = []

    def nothing(trees, samples, depth):
        seen.append((samples[:, 0].tolist(), depth))
        rootless = samples.clone()
        rootless[:, 0] = VOCAB  # nobody's child: nothing is accepted
        return tree_accept(trees.tokens, trees.parents, rootless, depth=depth)

    host, step, requests = made(LAWS["greedy"], simulated=nothing)
    host.run(step, requests)
    (outcome,) = host.outcomes
    assert outcome.accepted.lengths.tolist() == [1] * 3
    assert [request.text[-1] for request in requests] == [VOCAB] * 3
    assert seen == [([int(oracle(request.text[:-1]).argmax()) for request in requests], host.block - 1)]


def test_features_that_nobody_drafts_from_are_not_kept():
    host, step, requests = made(LAWS["greedy"])
    stock = host.verify
    host.verify = lambda *given: stock(*given)._replace(features=None)
    for run in (0, 2):
        host.run(step, requests, run=run)
        assert "append" not in host.events
        assert all(map(right_so_far, requests))
        host.context[:] = 0.0  # of a drafter that has nothing to say
        host.draft = lambda batch, window: host.tail.trees(len(batch))


def test_what_comes_after_no_token_is_not_kept():
    """A drawn step of a run whose logits are NaN gives -1: its request ends there, the others go on."""
    tokens = torch.tensor([[5, NO_TOKEN, 6, 7], [1, 2, 3, 4], [NO_TOKEN, 1, 1, 1]])
    chains = Chains(6, "cpu")
    chain = chains.accepted(tokens, drawn=True)
    assert chain.lengths.tolist() == [2, 4, 1]
    assert chain.bonus.tolist() == [NO_TOKEN, 4, NO_TOKEN]
    assert chain.path.tolist() == [[0, 1, -1, -1, -1, -1], [0, 1, 2, 3, -1, -1], [0, -1, -1, -1, -1, -1]]
    assert chains.accepted(tokens[1:2], drawn=False).lengths.tolist() == [4]


def test_a_block_shorter_than_a_run_bounds_it():
    assert [run_of(block) for block in (2, 3, RUN, 16)] == [2, 3, RUN, RUN]
