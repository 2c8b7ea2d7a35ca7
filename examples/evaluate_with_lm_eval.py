"""Evaluate an export with lm-eval: the perplexity of a text of your own, or any of its tasks.

    zerotrain export RUN --out exported     # RUN with model=huggingface
    pip install lm-eval
    python examples/evaluate_with_lm_eval.py exported --text held_out.txt
    python examples/evaluate_with_lm_eval.py exported --tasks hellaswag,arc_easy

A task of lm-eval downloads its data; a text of your own does not.
"""

import argparse
import json
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="the folder of an export, with its tokenizer")
parser.add_argument("--text", help="a file of text: each is one document")
parser.add_argument("--tasks", default="", help="names of tasks, with commas between them")
parser.add_argument("--limit", type=int, help="so many documents of each task; by default all")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()
tasks: list = [task for task in args.tasks.split(",") if task]
if args.text:
    tasks.append(
        {
            "task": "own_text",
            "dataset_path": "text",
            "dataset_kwargs": {"data_files": {"test": args.text}, "sample_by": "document"},
            "output_type": "loglikelihood_rolling",
            "test_split": "test",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "should_decontaminate": False,
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
        }
    )
if not tasks:
    sys.exit("give --text FILE or --tasks NAMES")
try:
    import lm_eval
except ImportError:
    sys.exit("lm-eval is not installed; pip install lm-eval")

evaluated = lm_eval.simple_evaluate(
    model="hf",
    model_args={"pretrained": args.model, "dtype": "float32"},
    tasks=tasks,
    batch_size=args.batch_size,
    device=args.device,
    limit=args.limit,
)
for task, metrics in evaluated["results"].items():
    print(task, json.dumps({name: value for name, value in metrics.items() if isinstance(value, float)}))
