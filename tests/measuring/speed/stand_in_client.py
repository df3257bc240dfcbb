# SPDX-License-Identifier: Apache-2.0
"""Stands in for `vllm bench serve`, which takes ten seconds to start: sends the prompts, and writes a result.

STAND_IN may say how it goes wrong: `hang`, `fail`, or `lose` (a request).
"""

import argparse
import json
import os
import sys
import time
import urllib.request
from pathlib import Path


def ask(args: argparse.Namespace, line: str) -> None:
    message = {"role": "user", "content": json.loads(line)["content"]}
    fixed = {"model": "fake", "stream": True, "temperature": args.temperature, "ignore_eos": args.ignore_eos}
    body = {**fixed, "messages": [message], "max_completion_tokens": args.custom_output_len, **args.extra_body}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(args.base_url + args.endpoint, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        assert b"data: [DONE]" in response.read()


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--base-url", "--endpoint", "--dataset-path", "--result-dir", "--result-filename"):
        parser.add_argument(name)
    parser.add_argument("--custom-output-len", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--extra-body", type=json.loads, default={})
    args, _ = parser.parse_known_args()
    how = os.environ.get("STAND_IN")
    result = Path(args.result_dir, args.result_filename)
    if how == "hang":
        result.with_name("pid").write_text(str(os.getpid()))
        time.sleep(600)
    lines = Path(args.dataset_path).read_text().splitlines()
    for line in lines:
        ask(args, line)
    lost = how == "lose"
    counts = {"completed": len(lines) - lost, "failed": int(lost)}
    result.write_text(json.dumps({**counts, "median_ttft_ms": 150.0, "median_tpot_ms": 12.0}))
    print("said by the client")
    return how == "fail"


if __name__ == "__main__":
    sys.exit(main())
