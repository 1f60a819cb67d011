"""What the plan asks for where stage II was too short: a rung again with twice its steps, every arm, from its stage I.

    python nbs/paper/longer.py village

Rows go to nbs/results/carry/again.jsonl as those of the rung `village-long`; again.py stays as it was registered.
"""
import sys

import again


def main(rung):
    "Every arm and seed with stage I, rate and temperature of the rung, and stage II twice as long."
    longer, plan = f"{rung}-long", again.RUNGS[rung]
    first_stage, tuned, second = again.first_stage, again.tuned, plan["stage2"]
    again.RUNGS[longer] = plan | dict(stage2=second | {name: 2*second[name] for name in ("steps", "snapshot_steps")})
    again.first_stage = lambda _, *which: (first_stage(rung, *which)[0], {}) # what its anchors carry is known
    again.tuned = lambda _, *which: tuned(rung, *which)
    again.run(longer)


if __name__ == "__main__": main(sys.argv[1])
