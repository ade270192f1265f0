"""Other trainers under Shoal: a module for each of Trainer, Accelerate and Lightning, which imports it."""
