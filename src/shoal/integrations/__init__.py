"""Other trainers under Shoal: Hugging Face's Trainer and Accelerate, and Lightning.

Each module imports its library, so none is imported here. All of them want workers that carry Shoal's
variables alone, as `shoal run` starts them by default: then the library trains as one process, and Shoal
divides the data and shares what the workers learn.
"""
