"""An evaluator that misbehaves as its task's name says: `python -I -S bad_evaluator.py WORKSPACE TASK`."""

import json
import os
import sys
import time


def main(workspace, task):
    result = {"execution": "", "score": 0.0}
    if os.path.exists(f"{workspace}/result.json"):
        with open(f"{workspace}/result.json") as file:
            result = json.load(file)
    match os.path.basename(task):
        case "evaluator_fails":
            raise RuntimeError("the grader is broken")
        case "evaluator_says_nothing":
            return
        case "evaluator_says_nan":
            print("nan")
        case "evaluator_hangs":
            print(1.0, flush=True)
            time.sleep(1000)
        case "evaluator_loses_one" if result["execution"].endswith(".01"):
            print("0.0 points, or so")
        case "evaluator_recovers" if is_first(f"{task}/seen-{result['execution']}"):
            print("try again")
        case _:
            print(result["score"])


def is_first(mark):
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


main(*sys.argv[1:])
