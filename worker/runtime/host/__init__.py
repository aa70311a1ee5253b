"""What a worker tells of its host: processors, memory, GPUs and their temperature."""
