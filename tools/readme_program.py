"""Run the README's first program with the installed headrace, on images that are drawn here.

python tools/readme_program.py

`make dist-check` does so in an environment without the source of headrace.
"""

import random
import re
import runpy
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

import headrace

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "s3://bucket/train"
IMAGES_OF_A_CLASS = 48


def draw_images(folder: Path) -> None:
    """Write JPEGs of discs and squares, each class in a folder of its own."""
    generator = random.Random(0)
    for shape in ("disc", "square"):
        (folder / shape).mkdir(parents=True)
        for number in range(IMAGES_OF_A_CLASS):
            picture = Image.new("RGB", (96, 96), "white")
            draw = ImageDraw.Draw(picture)
            radius = generator.randint(20, 40)
            box = (48 - radius, 48 - radius, 48 + radius, 48 + radius)
            if shape == "disc":
                draw.ellipse(box, fill="blue")
            else:
                draw.rectangle(box, fill="blue")
            picture.save(folder / shape / f"{number:03d}.jpg")


def main() -> None:
    """Run the program from a folder outside of the clone."""
    installed = Path(headrace.__file__).resolve()
    if installed.is_relative_to(ROOT / "src"):
        raise SystemExit(
            f"headrace is imported from {installed}, which is not an installed wheel"
        )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)[0]
    if ADDRESS not in program:
        raise SystemExit(f"the first program of README.md does not read {ADDRESS}")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "train")
        draw_images(data)
        script = Path(folder, "program.py")
        script.write_text(program.replace(ADDRESS, str(data)), encoding="utf-8")
        runpy.run_path(str(script))
    print(f"The first program of README.md ran with headrace {headrace.__version__}")


if __name__ == "__main__":
    main()
