"""Known issues of the stack: bugs of torch, accelerate, transformers, DeepSpeed and others."""

from pathlib import Path

from pytest_distcompat.known import IssueFile

ISSUES = IssueFile("upstream", Path(__file__).with_name("issues.toml"))
