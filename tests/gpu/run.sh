#!/usr/bin/env bash
# What there is to see on a GPU, within nine minutes; started again, it goes on where it stopped. See docs/gpu.md.
#   tests/gpu/run.sh OUTPUT [--minutes 9] [--resume EARLIER_OUTPUT] [--again STAGE ...] [--only STAGE ...] [--list] [--cpu]
# The wheels of wheels.sh are in tests/gpu/wheels, or $WHEELS; $PYTHON (python3) is the Python that has torch.
set -euo pipefail
began=$(date +%s.%N)
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-$here/wheels}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

"$python" "$here/install.py" "$wheels" "$site"
# The command line tools of the wheels, and of the machine's Python: ranks are started by name.
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# Bytecode of what pip has just unpacked is written once, not by each of some hundred processes.
"$python" -m compileall -q "$site" || true
"$python" "$here/proof.py" "$@" --began "$began"
