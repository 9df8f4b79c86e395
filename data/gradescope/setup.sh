#!/usr/bin/env bash
# Gradescope runs this once, where it builds its image: Ubuntu 24.04, whose Python is 3.12.
set -e
apt-get update && apt-get install -y python3-venv
python3 -m venv /autograder/venv
cd /autograder/source/course
/autograder/venv/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu -r requirements.txt
