"""What is trained, in the forms of others: safetensors, Hugging Face, peft, torch's optimizers, torch's DCP.

`python -m zerotrain export`, one process. Tensors pass one by one: what is held is the largest of them.
"""
