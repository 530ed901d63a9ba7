"""Integrations with existing training loops: Hugging Face's Trainer, Lightning's Trainer and Fabric, accelerate.

Each integration is thin: the framework keeps its loop, the plan keeps its promises. A framework's own clipping, sharding of
batches, gradient accumulation and half-precision loss scaling would change what the accounting relies on, so they are refused
with the remedy.

| module | needs | what it gives |
|---|---|---|
| ``huggingface`` | ``hushgrad[hf]`` | :class:`~hushgrad.integrations.huggingface.PrivateTrainer` |
| ``trl`` | ``hushgrad[trl]`` | :class:`~hushgrad.integrations.trl.PrivateSFTTrainer` |
| ``lightning`` | ``hushgrad[lightning]`` | :class:`~hushgrad.integrations.lightning.PrivateFit` for the Trainer; Fabric needs nothing |
"""
