"""The parts of a step that sampled stacks are sorted into."""

from benchmarks.profile_parts import OTHER, count_parts

STEP = "run_busy_loop (vllm/v1/engine/core.py:1);EngineCore.step (vllm/v1/engine/core.py:2)"


def test_samples_are_counted_by_part():
    lines = [
        f"{STEP};Scheduler.schedule (vllm/v1/core/sched/scheduler.py:3) 4",
        f"{STEP};Scheduler.schedule (vllm/v1/core/sched/scheduler.py:7) 2",
        f"{STEP};GPUModelRunner._model_forward (vllm/v1/worker/gpu_model_runner.py:2) 5",
        "gc (collect.py:1) 1",
    ]

    assert count_parts("engine", "\n".join(lines)) == {
        "scheduler": 4 + 2,
        "model": 5,
        OTHER: 1,
    }


def test_the_innermost_known_frame_decides():
    forward = f"{STEP};GPUModelRunner._model_forward (gpu_model_runner.py:1)"
    inside = f"{forward};Qwen2ForCausalLM.compute_logits (qwen2.py:2);mm (linear.py:3)"

    assert count_parts("engine", f"{inside} 1\n") == {"output layer": 1}


def test_a_thread_that_waits_takes_no_time():
    waiting = "process_output_sockets (vllm/v1/engine/core.py:1);Condition.wait (threading.py:2)"
    working = "process_output_sockets (vllm/v1/engine/core.py:1);encode (msgpack.py:2)"

    counts = count_parts("engine", f"{waiting} 9\n{working} 2\n")

    assert counts == {"messages to and from the server": 2}


def test_a_function_with_a_backward_of_its_own_is_told_from_its_forward():
    product = "OpOverloadPacket.__call__ (torch/_ops.py:4)"
    step = "RankEngine.train_step (services/learner/engine/ranks/engine.py:1)"
    apply, linear = (
        "Function.apply (torch/autograd/function.py:2)",
        "services/learner/engine/linear.py",
    )
    forward = f"{step};{apply};_Product.forward ({linear}:3);multiply ({linear}:1);{product}"
    backward = f"{step};_Product.backward ({linear}:9);multiply ({linear}:1);{product}"

    counts = count_parts("learner", f"{forward} 2\n{backward} 5\n")

    assert counts == {"forward": 2, "backward": 5}


def test_a_name_that_was_read_while_it_changed_spoils_no_other_sample():
    torn = "run_busy_loop (vllm/v1/engine/core.py:1);for\x85ward\x1c (x\u2028.py:2)"
    whole = f"{STEP};Scheduler.schedule (vllm/v1/core/sched/scheduler.py:3)"

    counts = count_parts("engine", f"{torn} 3\n{whole} 2\n")

    assert counts == {OTHER: 3, "scheduler": 2}
