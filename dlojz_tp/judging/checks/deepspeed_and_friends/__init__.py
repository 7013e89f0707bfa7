"""Checks of 20_deepspeed_and_friends: batch sizes, DeepSpeed's engine, a fused and a 1-bit optimizer, Accelerate and Fabric."""
