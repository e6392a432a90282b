#!/usr/bin/env bash
# Put the wheels that run.sh installs into a directory, where there is a network:
#   tests/gpu/wheels.sh [DIRECTORY, by default tests/gpu/wheels]
# They are for the Python and processor of the machine with the GPU: PYTHON_VERSION (3.12) and x86-64 Linux. torch,
# transformers, accelerate and what these need are not among them: they are the machine's own.
set -euo pipefail
cd "$(dirname "$0")/../.."
into=${1:-tests/gpu/wheels}
python=${PYTHON:-python3}
version=${PYTHON_VERSION:-3.12}

mkdir -p "$into"
rm -f "$into"/*.whl

platforms=(--platform any)
for name in manylinux1 manylinux2010 manylinux2014 manylinux_2_17 manylinux_2_24 manylinux_2_27 manylinux_2_28 manylinux_2_34; do
    platforms+=(--platform "${name}_x86_64")
done
download() {
    "$python" -m pip download --quiet --only-binary=:all: --implementation cp --python-version "$version" \
        "${platforms[@]}" --constraint constraints.txt --dest "$into" "$@"
}

# What we and DeepSpeed need, with all that these need.
download pytest pytest-xdist pytest-timeout filelock psutil nvidia-ml-py jinja2 iniconfig packaging covertable expecttest \
    pydantic hjson py-cpuinfo msgpack einops ninja
# What would bring a torch.
download --no-deps torchao peft
# DeepSpeed has no wheels. Without its operators, which nothing of ours calls, it is the same for every Python.
DS_BUILD_OPS=0 "$python" -m pip wheel --quiet --no-deps --constraint constraints.txt --wheel-dir "$into" deepspeed
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$into" .

du -sh "$into"
