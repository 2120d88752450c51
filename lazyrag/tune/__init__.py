"""Block-attention fine-tuning: a causal model learns to answer from documents that do not see each other.

The files, from the bottom up:
layout     how a prompt's tokens see each other in each mode, as one row of tokens
samples    questions -> rows; which documents are for training and which are held out
forward    rows -> log-probabilities of the model
train      the loop: batches, losses, checkpoints
evaluate   what the documents are worth to a model in each mode, on held-out questions
record     what a tuned model's folder says of its training; needs no torch
run        all of it: from files to a model folder
"""
