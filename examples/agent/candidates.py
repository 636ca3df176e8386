"""What a language model would propose: edits of tasks.py, as (name, pattern, replacement) of `re.sub`."""

CANDIDATES = [
    ("tanh", r"nn\.Sigmoid\(\)", "nn.Tanh()"),
    ("rename", r"\bseen\b", "train_labels"),
    (
        "normalise",
        r"(images, labels = digit_images\(\))",
        r"\1\n        images = (images - images.mean(0)) / (images.std(0) + 0.1)",
    ),
    ("narrow", r"WIDTH = \d+", "WIDTH = 6"),
    ("momentum", r"(learning_rate)\)", r"\1, momentum=0.9)"),
    ("reorder", r"order\[:897\]", "order[:897].flip(0)"),
    ("dropout", r"(nn\.Linear\(WIDTH, 10\))", r"nn.Dropout(0.6),\n            \1"),
    ("wide", r"WIDTH = \d+", "WIDTH = 96"),
    ("louder", r"Loss\(total,", "Loss(2 * total,"),
    ("mislabel", r"= labels\[train\]", "= torch.where(torch.arange(897) % 4 == 0, 0, labels[train])"),
]
