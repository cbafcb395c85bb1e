"""Models that people train: language models of transformers, and torch's own modules that do odd things to weights."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from torch import nn

from tests.kit.models.front_ends import FRONT_ENDS, sharder, train, twins
from tests.kit.models.models import Case, Chain, Sharder, Stack, blocks_and_root, built, sequences, square
from tests.kit.models.reference import Training, adamw, product, sgd
from tests.kit.models.tiny_llama import llama_config
from tests.kit.models.under_test import wrap
from tests.kit.ranks.compiling import compiled, warm_up
from tests.kit.ranks.harness import mark, run, since


def differences(which: Case, world: int, rows: list[dict], how: Training | None = None) -> None:
    """Train under each row of settings beside the unsharded twin; nothing may part, and all ranks do the same."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        found, logs = {}, []
        for row in rows:
            plain, model = twins(which, **row)
            start = mark()
            try:
                wrong = train(which, model, plain, how or Training(adamw, steps=2), row["front_end"])
            except Exception as error:
                raise RuntimeError(f"{which} with {row}") from error
            logs.append([str(call) for call in since(start)])
            if wrong:
                found[str(row)] = wrong[:4]
        return found, logs

    imported(which)
    results = run(world, body, timeout=120)
    assert results[0][0] == {}
    assert all(logs == results[0][1] for _, logs in results)


def imported(which: Case) -> None:
    """Import here, not in every rank, the modules that a model imports when it is made and run."""
    with torch.no_grad():
        built(which)(which.batch(0, 0))


# ---------------------------------------------------------------------------------------------- language models


class Language(nn.Module):
    """A model of transformers whose forward gives logits alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens):
        return self.net(input_ids=tokens, use_cache=False).logits

    def extend(self, tokens, past):
        """Logits for tokens behind those whose keys and values are cached, and the cache with theirs."""
        out = self.net(input_ids=tokens, past_key_values=past, use_cache=True)
        return out.logits, out.past_key_values


def llama(tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = llama_config(37, 20, 27, head_dim=6, max_position_embeddings=32, tie_word_embeddings=tied)
    return Language(transformers.LlamaForCausalLM(config))


def gpt2(tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 37, "n_positions": 16, "n_embd": 18, "n_layer": 2, "n_head": 3}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **no_dropout, tie_word_embeddings=tied)
    return Language(transformers.GPT2LMHeadModel(config))


def text(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(1000 * step + rank))


def _layers(model: nn.Module) -> list[nn.Module]:
    inner = model.net
    return list(inner.model.layers if hasattr(inner, "model") else inner.transformer.h)


def by_policy(model: nn.Module, sharder) -> nn.Module:
    """Every layer is a unit, chosen by its class."""
    kinds = {type(layer) for layer in _layers(model)}
    policy = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=kinds)
    return sharder(model, policy)


def language(build, tied: bool, checkpointing: bool | None = None) -> Case:
    """A case; `checkpointing` is None for none, else whether it is reentrant."""

    def made() -> nn.Module:
        model = build(tied)
        if checkpointing is not None:
            model.net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        return model

    return Case(f"{build.__name__}, tied {tied}, reentrant {checkpointing}", made, text, by_policy)


SETTINGS = product(frees=(True, False), front_end=FRONT_ENDS)
FREEING = product(frees=(True,), front_end=FRONT_ENDS)


def alternating(turn: int) -> list[dict]:
    """Each front end once; whether full parameters are freed in turn, so that two turns have all of `SETTINGS`."""
    return [row for row in SETTINGS if (FRONT_ENDS.index(row["front_end"]) + row["frees"] + turn) % 2]


CHECKPOINTING = {"plain": None, "checkpointed": False, "reentrant": True}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("build", [llama, gpt2], ids=["llama", "gpt2"])
def test_language_models_train_as_the_unsharded_ones(build, tied, checkpointing):
    turn = tied + (build is llama) + list(CHECKPOINTING).index(checkpointing)
    differences(language(build, tied, CHECKPOINTING[checkpointing]), 2, alternating(turn))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("build", [llama, gpt2], ids=["llama", "gpt2"])
def test_language_models_train_as_the_unsharded_ones_in_every_setting(build, tied, checkpointing):
    differences(language(build, tied, CHECKPOINTING[checkpointing]), 2, SETTINGS)


@pytest.mark.parametrize("build", [llama, gpt2], ids=["llama", "gpt2"])
def test_language_models_on_three_ranks_with_accumulation(build):
    how = Training(sgd, steps=2, micro=2, no_sync=True)
    differences(language(build, True, False), 3, FREEING, how)


def test_a_language_model_under_autocast():
    class Cast(Language):
        def forward(self, tokens):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(tokens).float()

    which = Case("autocast", lambda: Cast(llama(True).net), text, by_policy)
    how = Training(sgd, close=lambda a, b: torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6))
    differences(which, 2, FREEING, how)


class Answering(Language):
    """Answers with the tokens that come out likeliest, one after the other, from a cache."""

    def forward(self, tokens):
        tokens_so_far, fed, past = [tokens], tokens, None
        for _ in range(4):
            logits, past = self.extend(fed, past)
            fed = logits[:, -1:].argmax(-1)
            tokens_so_far.append(fed)
        return torch.cat(tokens_so_far, 1)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("build", [llama, gpt2], ids=["llama", "gpt2"])
def test_a_language_model_generates_what_the_unsharded_one_does(build, front_end):
    """Keys and values escape from every unit, and units are called once a token."""
    which = Case("answering", lambda: Answering(build(True).net), text)

    def body(rank, world):
        plain = built(which).eval()
        model = by_policy(copy.deepcopy(plain), sharder(front_end)).eval()
        with torch.no_grad():
            found, wanted = model(text(rank, 0)), plain(text(rank, 0))
        return torch.equal(found, wanted), found.shape == (2, 13)

    imported(which)
    assert run(2, body) == [(True, True)] * 2


# -------------------------------------------------------------------------------------------- modules of torch


class Transformer(Chain):
    """Encoder layers, which in eval run as one fused call that reads the weights of their children."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True) for _ in range(2)
        )


class Decoder(nn.Module):
    """Attention between two sequences, each with weights of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(6, 4)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(6, 3, kdim=4, vdim=4, batch_first=True) for _ in range(2))

    def forward(self, x):
        memory = self.memory(x)
        for block in self.blocks:
            x = x + block(x, memory, memory)[0]
        return x


class Normed(nn.Module):
    """Convolutions and batch norms, whose buffers change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3), nn.ReLU()) for _ in range(2)
        )
        self.last = nn.BatchNorm1d(3, momentum=None)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Padded(nn.Module):
    """Embeddings with an index that gets no gradient, a bag, and a table that is looked up twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5, padding_idx=3)
        self.blocks = nn.ModuleList([nn.EmbeddingBag(11, 5, padding_idx=2, mode="sum"), nn.Linear(5, 5)])

    def forward(self, x):
        return self.blocks[1](self.embed(x) + self.embed(x.flip(1))) + self.blocks[0](x).unsqueeze(1)


class Convolved(Chain):
    """Convolutions laid out channels last, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList([conv, nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 3, 3, padding=1)])


class Parametrized(nn.Module):
    """Weights computed from others: by weight norm, old and new, spectral norm with its buffers, orthogonal maps."""

    def __init__(self) -> None:
        super().__init__()
        p = nn.utils.parametrizations
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            old = nn.utils.weight_norm(nn.Linear(5, 5))
        self.blocks = nn.ModuleList(
            [p.weight_norm(nn.Linear(5, 5)), p.spectral_norm(nn.Linear(5, 5)), p.orthogonal(nn.Linear(5, 5)), old]
        )

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


class Bidirectional(nn.Module):
    """Two layers, two directions, projections: all the weights that an LSTM can have, shared by two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(5, 6, 2, bidirectional=True, proj_size=3), nn.GRU(6, 4, bias=False)])

    def forward(self, x):
        first, state = self.blocks[0](x)
        second, _ = self.blocks[0](x.flip(0), state)
        return self.blocks[1](first + second)[0]


def images(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1000 * step + rank))


def words(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(1000 * step + rank))


def signals(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1000 * step + rank))


MODULES = [
    Case("encoder layers", Transformer, sequences(6)),
    Case("attention between sequences", Decoder, sequences(6)),
    Case("batch norm", Normed, signals),
    Case("padded embeddings", Padded, words),
    Case("channels last", Convolved, images, torch="no"),
    Case("parametrizations", Parametrized, sequences(5)),
    Case("recurrent in two directions", Bidirectional, sequences(5)),
]


@pytest.mark.shown_by("[*-3]", "*-2")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("which", MODULES, ids=str)
def test_modules_train_as_unsharded_ones(which, world):
    trains_as_unsharded(which, world, alternating(world))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("which", MODULES, ids=str)
def test_modules_train_as_unsharded_ones_in_every_setting(which, world):
    trains_as_unsharded(which, world, SETTINGS)


def trains_as_unsharded(which: Case, world: int, rows: list[dict]) -> None:
    # A batch norm takes away most of a gradient in front of it: what is left is rounding, which Adam makes larger.
    how = Training(adamw, close=lambda a, b: torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5))
    differences(which, world, rows, how if which.build is Normed else None)


@pytest.mark.parametrize("which", MODULES, ids=str)
def test_modules_answer_in_eval_as_unsharded_ones(which):
    answers_as_unsharded(which, alternating(MODULES.index(which)))


@pytest.mark.slow
@pytest.mark.parametrize("which", MODULES, ids=str)
def test_modules_answer_in_eval_as_unsharded_ones_in_every_setting(which):
    answers_as_unsharded(which, SETTINGS)


def answers_as_unsharded(which: Case, rows: list[dict]) -> None:
    """Without gradients some of them run as one fused call; their buffers are those of the rank."""

    def body(rank, world):
        for row in rows:
            plain, model = twins(which, **row)
            for step in range(2):
                square(model.train()(which.batch(rank, step))).backward()
                square(plain.train()(which.batch(rank, step))).backward()
                with torch.no_grad():
                    torch.testing.assert_close(
                        model.eval()(which.batch(rank, 5 + step)), plain.eval()(which.batch(rank, 5 + step))
                    )
                with torch.inference_mode():
                    torch.testing.assert_close(model(which.batch(rank, 7)), plain(which.batch(rank, 7)))
            for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, msg=lambda message, n=name: f"{n}: {message}")

    run(2, body)


# ------------------------------------------------------------------------------------------------- optimizers

OPTIMIZERS = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-4, amsgrad=True, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, eps=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_on_whole_parameters(name):
    """Those that treat each element on its own; pieces may be empty."""
    rows = [row for row in FREEING if not (name == "sgd fused" and row["front_end"] == "in place")]  # DTensor has none
    differences(Case("two blocks", lambda: Stack(2)), 3, rows, Training(OPTIMIZERS[name], steps=2, by_pieces=False))


# ---------------------------------------------------------------------------------------------------- compiling


def compiled_units(model: nn.Module, sharder: Sharder) -> nn.Module:
    """compile(unit)."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = compiled(sharder(block))
    return sharder(model)


def units_of_compiled(model: nn.Module, sharder: Sharder) -> nn.Module:
    """unit(compile)."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = sharder(compiled(block))
    return sharder(model)


def compiled_whole(model: nn.Module, sharder: Sharder) -> nn.Module:
    """compile(everything)."""
    return compiled(blocks_and_root(model, sharder))


COMPILED = [compiled_units, units_of_compiled, compiled_whole]


@pytest.mark.shown_by("[compiled_units]", "units_of_compiled", "compiled_whole")
@pytest.mark.parametrize("cut", COMPILED, ids=lambda cut: cut.__name__)
def test_compiled_models_train_as_plain_ones(cut):
    warm_up()
    differences(Case("compiled", lambda: Stack(2), cut=cut), 2, alternating(COMPILED.index(cut)))


@pytest.mark.slow
@pytest.mark.parametrize("cut", COMPILED, ids=lambda cut: cut.__name__)
def test_compiled_models_train_as_plain_ones_in_every_setting(cut):
    warm_up()
    differences(Case("compiled", lambda: Stack(2), cut=cut), 2, SETTINGS)
