"""What follows the LM head: a greedy token of each row of logits."""
