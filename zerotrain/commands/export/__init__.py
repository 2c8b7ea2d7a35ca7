"""Export writes standard formats: safetensors, Hugging Face, peft, torch's optimizers, torch's DCP.

`python -m zerotrain export`, one process. It reads tensors one by one, so that memory holds the largest of them.
"""
