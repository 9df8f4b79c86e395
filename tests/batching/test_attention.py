"""Attention over packed documents: what each document gets alone, by every variant that the machine has."""

import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import layout_of, one_by_one
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

from helpers.amp import Autocast
from helpers.batching import attention, documents
from helpers.batching.attention import (
    ALIGNED_NUMBERS,
    block_mask,
    missing_because,
    packed_attention,
    without_cudnn_attention,
)
from helpers.batching.packed import causal_mask, join
from helpers.models import GPT2LikeModel

HERE = ("dense", "flex", "varlen")  # the variants that run on the CPU
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)


def qkv(length, heads=2, kv_heads=2, dtype=torch.float64):
    return [torch.randn(1, number, length, 8, dtype=dtype) for number in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("kv_heads", [4, 1])
@settings(max_examples=8, deadline=None)
@given(lengths=LENGTHS)
def test_documents_and_their_gradients_are_what_they_are_alone(variant, kv_heads, lengths):
    inputs = [x.requires_grad_() for x in qkv(sum(lengths), 4, kv_heads)]
    out, alone = packed_attention(layout_of(lengths), variant, "cpu")(*inputs), one_by_one(*inputs, lengths)
    upstream = torch.randn_like(out)
    gradients, expected = (torch.autograd.grad(x, inputs, upstream) for x in (out, alone))
    torch.testing.assert_close([out, *gradients], [alone, *expected], atol=1e-12, rtol=1e-9)
    with torch.no_grad():  # flex has a path of its own
        torch.testing.assert_close(packed_attention(layout_of(lengths), variant, "cpu")(*inputs), alone)


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, size=st.sampled_from([2, 8, 16, 128]))
def test_the_block_mask_is_the_one_that_torch_finds_pair_by_pair(lengths, size):
    layout = layout_of(lengths)
    ours = block_mask(layout.documents, "cpu", size)
    theirs = create_block_mask(ours.mask_mod, None, None, len(layout), len(layout), device="cpu", BLOCK_SIZE=size)
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for table in (f"{side}_{what}" for side in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")):
        result, expected = getattr(ours, table), getattr(theirs, table)
        assert result.dtype == expected.dtype and torch.equal(result, expected), table


def test_a_block_mask_takes_no_memory_for_pairs():
    layout = layout_of([100] * 163 + [84])  # 16,384 positions: 256 MiB of pairs
    documents = layout.documents
    tracemalloc.start()
    block_mask(documents, "cpu")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20


def test_flex_is_not_compiled_again_for_other_documents():
    inputs = qkv(150, dtype=torch.float32)
    packed_attention(layout_of([150]), "flex", "cpu")(*inputs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([1, 149], [50, 50, 50], [1] * 150):
            result = packed_attention(layout_of(lengths), "flex", "cpu")(*inputs)
            torch.testing.assert_close(result, one_by_one(*inputs, lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_densely_one_added_mask_serves_all_layers_and_gives_what_a_boolean_one_gives(dtype, monkeypatch):
    layout, handed = layout_of([20, 1, 16]), []
    product = F.scaled_dot_product_attention

    def spy(*inputs, attn_mask, **options):
        handed.append(attn_mask)
        return product(*inputs, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    inputs = [x.requires_grad_() for x in qkv(37, dtype=dtype)]
    with torch.inference_mode():
        attend = packed_attention(layout, "dense", "cpu")
        attend(*inputs)
    result = [attend(*inputs) for _ in range(3)]
    result[-1].sum().backward()  # the mask of a call without gradients serves one with them
    seen = causal_mask(torch.from_numpy(layout.documents))
    assert torch.equal(result[0], product(*inputs, attn_mask=seen))
    assert len({mask.untyped_storage().data_ptr() for mask in handed}) == 1
    assert {mask.dtype for mask in handed} == {dtype}
    assert handed[0].stride(0) % ALIGNED_NUMBERS == 0 and handed[0].stride(1) == 1


@pytest.mark.long
def test_densely_a_compiled_model_has_one_mask_for_all_layers_and_is_not_compiled_again_for_other_documents():
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition, inference_compiler=keep
    )
    torch._dynamo.reset()
    network = GPT2LikeModel(50, d_model=16, num_heads=2, num_layers=2, dropout=0.0, max_length=40)
    compiled = torch.compile(network, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([20, 17], [12, 12, 13]):
            layout = layout_of(lengths)
            tokens, positions = torch.randint(3, 50, (1, 37)), torch.from_numpy(layout.positions)
            result = compiled(tokens, positions, attend=packed_attention(layout, "dense", "cpu"))
            expected = network(tokens, positions, attend=packed_attention(layout, "dense", "cpu"))
            torch.testing.assert_close(result, expected)
            result.sum().backward()
    forward = graphs[0]
    assert len(graphs) == 2  # forward and backward
    assert sum("scaled_dot_product" in name for name in forward) == 4
    assert sum("tril" in name for name in forward) == 1


@pytest.mark.parametrize("before", [True, False])
def test_cudnns_attention_is_off_inside_unless_it_is_asked_for_by_name_and_is_as_it_was_after(before):
    enabled, enable = torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp
    default = enabled()
    enable(before)
    try:
        with without_cudnn_attention():
            assert not enabled()
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                assert enabled()
            assert not enabled()
        assert enabled() == before
        with pytest.raises(KeyError), without_cudnn_attention():
            raise KeyError
        assert enabled() == before
    finally:
        enable(default)


def reference_varlen(q, k, v, starts_q, starts_k, longest_q, longest_k, *, window_size, enable_gqa=False):
    """`varlen_attn` as its documentation describes it: (T, heads, head_dim), documents between int32 starts."""
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert torch.equal(starts_q, starts_k)
    assert type(longest_q) is type(longest_k) is int
    assert longest_q == longest_k == starts_q.diff().max()
    assert window_size == (-1, 0)  # causal
    assert enable_gqa or q.shape[1] == k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return one_by_one(q, k, v, starts_q.diff().tolist())[0].transpose(0, 1)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_varlen_is_handed_what_flash_attention_asks_for(kv_heads, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", reference_varlen)
    lengths = [3, 0, 17, 1]
    q, k, v = qkv(21, 4, kv_heads, torch.bfloat16)
    layout = layout_of(lengths)
    result = attention._flash(layout, torch.from_numpy(layout.offsets.copy()))(q, k, v, 0.0)
    torch.testing.assert_close(result, one_by_one(q, k, v, lengths))


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("region", [Autocast(torch.bfloat16), torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("gradients", [True, False])
def test_under_autocast_it_computes_in_the_regions_type(variant, region, gradients):
    inputs = [x.requires_grad_(gradients) for x in qkv(30, dtype=torch.float32)]
    attend = packed_attention(layout_of([10, 20]), variant, "cpu")
    with region:
        result = attend(*inputs)
        assert (inputs[0] @ inputs[1].mT).dtype == torch.bfloat16  # the region is as it was
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), one_by_one(*inputs, [10, 20]), atol=0.05, rtol=0.05)
    if gradients:
        assert [x.dtype for x in torch.autograd.grad(result.sum(), inputs)] == [torch.float32] * 3


def test_a_table_can_say_which_variants_run_and_why_others_do_not():
    for variant in HERE:
        assert missing_because(variant, "cpu", torch.float32) == ""
    assert missing_because("dense", "mps", torch.float16) == ""
    assert missing_because("varlen", "mps", torch.bfloat16) == missing_because("flex", "mps") == "needs CUDA"


def test_documents_are_compiled_once_and_computed_as_they_are_eagerly():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    call = torch.compile(documents.documents_attention, backend=backend, fullgraph=True, dynamic=True)
    for lengths in ([7, 1, 4], [2, 10], [3, 3, 3, 3]):
        q, k, v = qkv(12, dtype=torch.float32)
        result = call(q, k, v, torch.from_numpy(layout_of(lengths).offsets.copy()))
        torch.testing.assert_close(result, one_by_one(q, k, v, lengths))
    assert len(graphs) == 1


@pytest.mark.parametrize(("amx", "types"), [(False, [torch.float32] * 2), (True, [torch.float32, torch.bfloat16])])
def test_with_amx_the_backward_of_long_documents_alone_is_computed_in_bf16(amx, types, monkeypatch):
    seen, backward = [], documents._backward
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(documents, "_backward", lambda *inputs: seen.append(inputs[0].dtype) or backward(*inputs))
    inputs = [x.requires_grad_() for x in qkv(3130, dtype=torch.bfloat16)]
    documents.documents_attention(*inputs, torch.from_numpy(layout_of([50, 3080]).offsets.copy())).sum().backward()
    assert seen == types


def test_a_packed_batch_gives_its_layout():
    batch = join(np.arange(1, 31), np.array([20, 1, 9]), length=40)
    layout = batch.layout()
    assert layout.positions[:30].tolist() == batch.positions[:30].tolist()
    inputs = qkv(40)
    result = packed_attention(layout, "varlen", "cpu")(*inputs)
    torch.testing.assert_close(result, one_by_one(*inputs, [20, 1, 9, 10]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: packed_attention(layout_of([3]), "flash", "cpu"), "variant is 'flash'; valid: 'dense', 'flex', 'var"),
        (lambda: packed_attention(layout_of([3]), "flex", "mps"), "variant is 'flex', which can't run on mps: needs C"),
        (lambda: dense(*qkv(6)), r"q is \(1, 2, 6, 8\); the layout ends at 7, so it must be \(1, heads, 7, he"),
        (lambda: dense(qkv(7)[0], *torch.randn(2, 2, 2, 7, 8)), r"k is \(2, 2, 7, 8\)"),
        (lambda: packed_attention(layout_of([7]), "flex", "cpu")(*qkv(7), 0.1), "dropout is 0.1; 'flex' has no dropo"),
    ],
)
def test_wrong_calls_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def dense(*inputs):
    return packed_attention(layout_of([3, 4]), "dense", "cpu")(*inputs)
