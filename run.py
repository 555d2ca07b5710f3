"""python run.py experiments/armt_ablation_gamma.yaml"""

from lit_memory.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
