"""A rank that ends in the way of its argument, without torch."""

import os
import signal
import subprocess
import sys
import time


def inner() -> None:
    raise ValueError("rank 1 does not want to")


def caught() -> None:
    try:
        sys.exit(3)
    except SystemExit:
        print("never mind")


how = sys.argv[1]
if how == "begin again" and sys.argv[-1] != "again":
    os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
if how == "begin again and raise":
    os.execv(sys.executable, [sys.executable, sys.argv[0], "raise"])
# In one piece: torchrun has Python write at once what it gets, and print's end of a line comes apart from the line.
sys.stdout.write(f"rank {os.environ['RANK']} is about to: {how}\n")
sys.stdout.flush()
if how == "hook":
    sys.excepthook = lambda *_: None
if os.environ["RANK"] == "1":
    if how in {"raise", "hook"}:
        inner()
    if how == "exit":
        sys.exit(3)
    if how == "exit in except":
        try:
            inner()
        except ValueError:
            sys.exit(1)
    if how == "caught":
        caught()
    if how == "exit in finally":
        try:
            sys.exit(3)
        finally:
            print("on the way out")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "vanish":
        os._exit(0)
    if how == "hang":
        time.sleep(600)
    if how == "kill the launcher":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if how == "child":
        subprocess.run([sys.executable, "-c", "raise SystemExit(5)"], check=False)
    if how == "leave one behind":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
if how in {"raise", "kill"}:
    time.sleep(600)
