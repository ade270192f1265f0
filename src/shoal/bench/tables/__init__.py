"""What the samples of benchmarks say: RESULT lines, tables and headlines, by the benchmark's name."""
