"""The parser of optimized HLO modules, tested with a module written by hand."""

import pytest

from vit_jax.planning.hlo import UNKNOWN_LOOP, by, read_operations, total

MODULE = """\
HloModule jit_train_step, is_scheduled=true

FileNames
1 "/home/me/vit_jax/vit_jax/training/step.py"
2 "/home/me/vit_jax/vit_jax/models/vit.py"
3 "/usr/lib/python3/site-packages/optax/_src/transform.py"
4 "/home/me/vit_jax/vit_jax/models/layers.py"
5 "/usr/lib/python3/site-packages/flax/nnx/nn/linear.py"

FunctionNames
1 "make_train_step.<locals>.train_step"
2 "Mlp.__call__"
3 "scale_by_adam.<locals>.update_fn"
4 "run_layers.<locals>.body"
5 "Linear.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=2}
2 {file_name_id=4 function_name_id=4 line=1 end_line=1 column=1 end_column=2}
3 {file_name_id=2 function_name_id=2 line=1 end_line=1 column=1 end_column=2}
4 {file_name_id=5 function_name_id=5 line=1 end_line=1 column=1 end_column=2}
5 {file_name_id=3 function_name_id=3 line=1 end_line=1 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=4}
5 {file_location_id=5 parent_frame_id=2}


%product (a: bf16[8,32], b: bf16[32,64]) -> bf16[8,64] {
  %a = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[32,64]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = bf16[8,64]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf
}

%begin (w: bf16[32,8]) -> (bf16[32,8], bf16[32,64]) {
  %w = bf16[32,8]{1,0} parameter(0)
  %gather.1 = bf16[32,64]{1,0} all-gather(%w), channel_id=7, dimensions={1}
  ROOT %t = (bf16[32,8]{1,0}, bf16[32,64]{1,0}) tuple(%w, %gather.1)
}

%end (w.1: bf16[32,8]) -> bf16[32,64] {
  %w.1 = bf16[32,8]{1,0} parameter(0)
  ROOT %gather.2 = bf16[32,64]{1,0} all-gather(%w.1), channel_id=7, dimensions={1}
}

%all-reduce-scatter.1 (g: f32[32,64]) -> f32[32,8] {
  %g = f32[32,64]{1,0} parameter(0)
  %reduce.1 = f32[32,64]{1,0} all-reduce(%g), channel_id=9, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %slice.1 = f32[32,8]{1,0} dynamic-slice(%reduce.1, %zero, %zero), dynamic_slice_sizes={32,8}
}

%condition (p: (s32[], bf16[8,32])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  %p = (s32[]{:T(128)}, bf16[8,32]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (q: (s32[], bf16[8,32])) -> (s32[], bf16[8,32]) {
  %q = (s32[]{:T(128)}, bf16[8,32]{1,0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %x = bf16[8,32]{1,0} get-tuple-element(%q), index=1
  %y = bf16[32,64]{1,0} constant({...})
  %fusion.1 = bf16[8,64]{1,0} fusion(%x, %y), kind=kOutput, calls=%product, \
metadata={op_name="jit(train_step)/gradients/jvp(loss)/while/body/dot_general" stack_frame_id=4}, \
backend_config={"window_config":{"estimated_cycles":"1000"}}
  %step = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} add(%j, %step)
  %permute.1 = bf16[8,32]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1}}
  %permute.2 = bf16[8,32]{1,0} collective-permute(%permute.1), channel_id=1, \
source_target_pairs={{0,1}}
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[8,32]{1,0}) tuple(%next, %x)
}

ENTRY %main (x.1: bf16[8,32], w.2: bf16[32,8], m.1: f32[32,64]) -> f32[32,8] {
  %x.1 = bf16[8,32]{1,0} parameter(0)
  %w.2 = bf16[32,8]{1,0} parameter(1)
  %m.1 = f32[32,64]{1,0} parameter(2)
  %i.1 = s32[]{:T(128)} constant(0)
  %init = (s32[]{:T(128)}, bf16[8,32]{1,0}) tuple(%i.1, %x.1)
  %while.1 = (s32[]{:T(128)}, bf16[8,32]{1,0}) while(%init), condition=%condition, body=%body
  %async-start = (bf16[32,8]{1,0}, bf16[32,64]{1,0}) fusion(%w.2), kind=kCustom, calls=%begin
  %async-done = bf16[32,64]{1,0} fusion(%w.2), kind=kCustom, calls=%end
  %sum.1 = (f32[32,64]{1,0}, f32[32,64]{1,0}) all-reduce(%m.1, %m.1), channel_id=8, to_apply=%add
  %update = f32[32,64]{1,0} fusion(%m.1), kind=kLoop, calls=%elementwise, \
metadata={op_name="jit(train_step)/optimizer/mul" stack_frame_id=5}, \
backend_config={"window_config":{"estimated_cycles":"300"}}
  ROOT %fusion.9 = f32[32,8]{1,0} fusion(%m.1), kind=kCustom, calls=%all-reduce-scatter.1
}

%elementwise (e: f32[32,64]) -> f32[32,64] {
  %e = f32[32,64]{1,0} parameter(0)
  ROOT %mul = f32[32,64]{1,0} multiply(%e, %e)
}
"""


@pytest.fixture
def operations():
    return read_operations(MODULE.replace("STEP", "1"))


def test_a_loops_body_counts_as_often_as_it_runs(operations):
    assert total(operations, "cycles") == 12 * 1000 + 300
    assert total(operations, "flops") == 12 * 2 * 8 * 32 * 64


def test_a_loop_that_the_compiler_unrolled_by_two_runs_half_as_often():
    assert total(read_operations(MODULE.replace("STEP", "2")), "cycles") == 6 * 1000 + 300


@pytest.mark.parametrize(
    ("part", "other"),
    [("direction=LT", "direction=NE"), ("constant(12)", "parameter(1)")],
)
def test_a_loop_that_depends_on_the_data_counts_once(part, other):
    operations = read_operations(MODULE.replace("STEP", "1").replace(part, other))
    assert total(operations, "cycles") == 1000 + 300
    assert [x.name for x in operations if x.kind == UNKNOWN_LOOP] == ["while.1"]


CHOICE = """\
  %choice = f32[32,64]{1,0} conditional(%i.1, %m.1, %m.1), BRANCHES
  ROOT %fusion.9 ="""
BRANCH = """
%NAME (e.NAME: f32[32,64]) -> f32[32,64] {
  %e.NAME = f32[32,64]{1,0} parameter(0)
  ROOT %mul.NAME = f32[32,64]{1,0} multiply(%e.NAME, %e.NAME), \
backend_config={"window_config":{"estimated_cycles":"CYCLES"}}
}
"""


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%cheap, %dear}",
        "true_computation=%dear, false_computation=%cheap",
    ],
)
def test_a_conditional_counts_as_its_branch_with_the_most_cycles(branches):
    module = MODULE.replace("STEP", "1").replace("  ROOT %fusion.9 =", CHOICE)
    for name, cycles in {"cheap": "40", "dear": "900"}.items():
        module += BRANCH.replace("NAME", name).replace("CYCLES", cycles)
    operations = read_operations(module.replace("BRANCHES", branches))
    assert total(operations, "cycles") == 12 * 1000 + 300 + 900


def test_a_kernels_cycles_and_flops_are_in_its_metadata():
    start, end = MODULE.index("  %fusion.1 = bf16[8,64]"), MODULE.index("  %step = ")
    kernel = (
        '  %call = bf16[8,64]{1,0} custom-call(%x, %y), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n"cycles":"500",\n"flops":"70"\n}}, '
        'metadata={op_name="jit(train_step)/pallas_call" stack_frame_id=4}\n'
    )
    module = (MODULE[:start] + kernel + MODULE[end:]).replace("STEP", "1")
    operations = read_operations(module)
    assert total(operations, "cycles") == 12 * 500 + 300
    assert total(operations, "flops") == 12 * 70


def test_a_collective_written_into_several_fusions_counts_once(operations):
    assert by(operations, "kind", "sent")["all-gather"] == 32 * 64 * 2


def test_permutes_of_one_channel_count_each_time(operations):
    """`shard_map` gives the same channel to all permutes of a function."""
    assert by(operations, "kind", "sent")["collective-permute"] == 12 * 2 * 8 * 32 * 2


def test_a_sum_followed_by_a_slice_is_a_reduce_scatter(operations):
    sent = by(operations, "kind", "sent")
    assert sent["reduce-scatter"] == 32 * 64 * 4
    assert sent["all-reduce"] == 2 * 32 * 64 * 4  # Two arrays are summed at once.


def test_an_operation_belongs_to_the_part_that_it_was_traced_in(operations):
    assert by(operations, "part", "cycles") == {"Mlp": 12_000, "optimizer": 300}


@pytest.mark.parametrize(
    ("line", "products"),
    [
        # 3x3 kernel, 4x4 image, padding 1: 10 of 12 taps along each axis are inside the image.
        (
            "bf16[2,4,4,6] bf16[3,3,6,8] bf16[2,4,4,8] size=3x3_pad=1_1x1_1 b01f_01io->b01f",
            2 * 100 * 6 * 8,
        ),
        # A batched product with batch size 5, as TPU programs express it: one tap per product.
        (
            "bf16[5,4,6] bf16[5,6,8] bf16[5,4,8] size=5_stride=4_lhs_dilate=5 0bf_0io->0bf",
            5 * 4 * 6 * 8,
        ),
        ("bf16[4,6] bf16[6,8] bf16[4,8] - bf_io->bf", 4 * 6 * 8),
    ],
)
def test_products_are_counted_where_they_meet_an_input(line, products):
    left, right, out, window, labels = line.split()
    window = (
        ""
        if window == "-"
        else f"window={{{window.replace('_', ' ', 1).replace('_lhs', ' lhs')}}}, "
    )
    module = f"""ENTRY %main (a: {left}, b: {right}) -> {out} {{
  %a = {left}{{0}} parameter(0)
  %b = {right}{{0}} parameter(1)
  ROOT %c = {out}{{0}} convolution(%a, %b), {window}dim_labels={labels}
}}
"""
    assert total(read_operations(module), "flops") == 2 * products
