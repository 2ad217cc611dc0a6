"""Cycles of TPU programs: bundles times iterations, or memory traffic if it takes longer."""

import os

import pytest

from vit_jax.planning.hlo import Operation, read_operations
from vit_jax.planning.schedule import (
    count_bundles,
    dumped_schedules,
    larger_cycles,
    take_schedules,
    with_schedules,
)

HEADER = """\
= control target key start
LB: loop body
= control target key end

"""
# Two bundles, a loop of four bundles, two bundles. A bundle may span several lines and may be
# empty.
PIPELINED = (
    HEADER
    + """\
     0   :  { %2 = vsyncpa [#allocation1], 0 }
   0x1   :  { %s8 = smov.u32 0 } /* Start region 17 */
   0x2 LB: > { %s9 = sadd.s32 1, %s8 } /* Start region 25 */
   0x3   : > { %11 = dma.hbm_to_vmem [thread:$0]  (%p1_p0), /*hbm=*/%s5
base_bounds: (128, 4)
iteration_bounds: (2, 1)
element_size_in_bytes: 2048 */ }
   0x4   :  {}
   0x5 PF: > { %p7_p5 = scmp.ge.s32.totalorder %s10_s8, 12 /* loop exit test */ }
   0x6   :  { %9 = sbr.rel (!%p7_p5) target = $region25 }
   0x7   :  {} /* End region 25 */
   0x8   :  { %12 = vsyncpa [#allocation1], 1 } /* exit bundle: %copy = copy(%x.1) */
"""
)


def nested(inner_test: str) -> str:
    """Returns a program whose outer loop of 3 iterations contains an inner loop of two bundles.

    The outer loop is not pipelined.
    """
    return (
        HEADER
        + f"""\
     0   :  {{ %s1 = smov.u32 0 }}
   0x1 LB: > {{ %s2 = sadd.s32 1, %s1 }} /* Start region 5 */
   0x2   : > {{ %21 = sbr.rel (%p9_p9) target = $region8 }}
   0x3 LB: >> {{ %p3_p3 = {inner_test}  ;;  %s3 = sadd.s32 1, %s3 }} /* Start region 6 */
   0x4   : >> {{ %22 = sbr.rel (!%p3_p3) target = $region6 }}
   0x5   : > {{ %p4_p4 = scmp.ge.s32.totalorder %s2, 3 }} /* Start region 8 */
   0x6   : > {{ %23 = sbr.rel (!%p4_p4) target = $region5 }}
"""
    )


def test_a_pipelined_loop_skips_its_first_and_last_iteration():
    # The loop is from 0x2 to the branch at 0x6. 10 of its 12 iterations execute the whole body.
    assert count_bundles(PIPELINED) == 9 + 5 * 9


@pytest.mark.parametrize(
    "inner_test, iterations",
    [
        ("scmp.ge.s32.totalorder %s3, 7", 7),
        # Only outer loops are pipelined.
        ("scmp.ge.s32.totalorder %s3, 7 /* loop exit test */", 7),
        ("scmp.gt.s32.totalorder %s3, 7", 8),
        ("scmp.ge.s32.totalorder %s3, %s99", 1),  # The bound is unknown.
        ("scmp.ge.s32.totalorder %s3, 0", 1),
    ],
)
def test_iterations_of_nested_loops_are_multiplied(inner_test, iterations):
    assert count_bundles(nested(inner_test)) == 1 + 3 * (4 + 2 * iterations)


def test_a_forward_branch_is_no_loop():
    text = PIPELINED.replace("$region25", "$region99")
    assert count_bundles(text) == 9


def test_schedules_are_taken_from_the_dump_by_name(tmp_path):
    (tmp_path / "179-copy.1-01-final_bundles.txt").write_text(PIPELINED)
    (tmp_path / "179-copy.1-00-schedule-analysis_final_bundles.txt").write_text("other")
    (tmp_path / "179-TLP-hlo.txt").write_text("other")
    assert take_schedules(tmp_path) == {"copy.1": 54}
    assert not list(tmp_path.iterdir())


def test_equal_operations_share_a_schedule():
    operations = [
        Operation("a.1", "fusion", "", "Mlp", cycles=10, traffic=64),
        Operation("a.2", "fusion", "x", "Mlp", times=3, cycles=10, traffic=64),
        Operation("b", "fusion", "", "Mlp", cycles=10, traffic=128),
        Operation("reshape.1", "reshape", "", "Mlp", traffic=64),
        Operation("parameter.1", "parameter", "", "Mlp", traffic=64),
    ]
    scheduled = with_schedules(operations, {"a.1": 54, "reshape.1": 7})
    assert {x.name: x.schedule for x in scheduled} == {
        "a.1": 54,
        "a.2": 54,
        "b": 10,
        "reshape.1": 7,
    }
    # Three executions of 54 cycles of bundles, or of 64 bytes at half a byte per cycle.
    assert [larger_cycles(scheduled[1], rate) for rate in (2, 0.5)] == [3 * 54, 3 * 128]


def test_equal_operations_of_other_parts_share_a_schedule():
    operations = [
        Operation("a.1", "fusion", "", "Mlp", cycles=10),
        Operation("a.2", "fusion", "", "Attention", cycles=10),
        Operation("a.3", "fusion", "", "Attention", cycles=10),
        Operation("a.4", "fusion", "", "EncoderBlock", cycles=10),
    ]
    schedules = {x.name: x.schedule for x in with_schedules(operations[:2], {"a.1": 4})}
    assert schedules == {"a.1": 4, "a.2": 4}
    # An operation of the same part has precedence.
    schedules = {x.name: x.schedule for x in with_schedules(operations, {"a.1": 4, "a.2": 5})}
    assert schedules["a.3"] == 5
    assert schedules["a.4"] in (4, 5)


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[10,100]{1,0:T(8,128)}", 16 * 128 * 4),
        ("f32[10,100]{0,1:T(8,128)}", 128 * 104 * 4),
        ("bf16[3,10,100]{2,1,0:T(8,128)(2,1)}", 3 * 16 * 128 * 2),
        ("f32[10,100]{1,0:T(8,128)S(1)}", 0),  # In VMEM.
        ("(f32[10]{0:T(128)}, s32[]{:T(128)S(6)})", 128 * 4),
    ],
)
def test_traffic_is_in_hbm_and_with_padding(shape, size):
    text = f"""\
ENTRY %main (x: f32[2,128]) -> f32[2,128] {{
  %x = f32[2,128]{{1,0:T(8,128)}} parameter(0)
  ROOT %fusion.1 = {shape} fusion(%x), kind=kLoop, calls=%inner, metadata={{op_name="mul"}}
}}

%inner (y: f32[2,128]) -> f32[2,128] {{
  ROOT %y = f32[2,128]{{1,0:T(8,128)}} parameter(0)
}}
"""
    fusion = read_operations(text, every=True)[1]
    assert fusion.traffic == size + 8 * 128 * 4


def test_asynchronous_copies_have_no_traffic():
    text = """\
ENTRY %main (x: f32[2,128]) -> f32[2,128] {
  %x = f32[2,128]{1,0:T(8,128)} parameter(0)
  %start = (f32[2,128]{1,0:T(8,128)S(1)}, f32[2,128]{1,0:T(8,128)}) copy-start(%x)
  ROOT %done = f32[2,128]{1,0:T(8,128)S(1)} copy-done(%start)
}
"""
    assert [x.traffic for x in read_operations(text, every=True)[1:]] == [0, 0]


@pytest.mark.parametrize("given", [None, "--xla_tpu_scoped_vmem_limit_kib=1024"])
def test_flags_of_the_compiler_are_restored(monkeypatch, given):
    if given is None:
        monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    else:
        monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    with dumped_schedules() as folder:
        flags = os.environ["LIBTPU_INIT_ARGS"].split()
        assert f"--xla_jf_dump_to={folder}" in flags
        assert given is None or given in flags
    assert os.environ.get("LIBTPU_INIT_ARGS") == given
    assert not folder.exists()


def test_a_kernel_with_several_results_is_counted_once():
    metadata = 'frontend_attributes={kernel_metadata={"cycles":"500","flops":"70"}}'
    text = f"""\
ENTRY %main (x: f32[8,128]) -> f32[8,128] {{
  %x = f32[8,128]{{1,0:T(8,128)}} parameter(0)
  %call = (f32[8,128]{{1,0:T(8,128)}}, f32[8,128]{{1,0:T(8,128)}}) custom-call(%x), {metadata}
  ROOT %result = f32[8,128]{{1,0:T(8,128)}} get-tuple-element(%call), index=0, {metadata}
}}
"""
    assert [(x.name, x.cycles, x.flops) for x in read_operations(text)] == [("call", 500, 70)]
