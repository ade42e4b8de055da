"""Makes torchvision importable beside a torch without CUDA.

PyPI's torchvision for Linux is built for CUDA. Beside a CPU build of torch its compiled operators
cannot be loaded; it skips them, except for two that it refers to at import. Declaring those is
enough for what does not call them."""

import torch

if torch.version.cuda is None:
    # it is registered for as long as this object lives
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(
            f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
