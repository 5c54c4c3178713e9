set -x
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$HOME/site" .whl/*.whl && export PYTHONPATH="$HOME/site"
nproc; df -h /tmp /dev/shm | cat
(cd tests && timeout 280 python3 -m pytest -c ../pyproject.toml --rootdir .. -m gpu -x --timeout=250 . ) > $OUT/gpu-tests.txt 2>&1; tail -5 $OUT/gpu-tests.txt
timeout 60 python3 -m bench.states_to_gpu 2>&1 | tee $OUT/states.txt
timeout 120 python3 -m bench.store_read --folder /dev/shm/b --gigabytes 6 --parts 6 --threads 8 --rounds 7 2>&1 | tee $OUT/read-shm.txt
rm -rf /dev/shm/b
timeout 120 python3 -m bench.store_read --folder /tmp/b --gigabytes 6 --parts 6 --threads 8 --rounds 5 --cold 2>&1 | tee $OUT/read-disk.txt
timeout 60 python3 -m bench.store_write --folder /tmp/b --gigabytes 3 --rounds 3 2>&1 | tee $OUT/write-disk.txt
timeout 60 python3 -m bench.store_write --folder /dev/shm/b --gigabytes 3 --rounds 4 2>&1 | tee $OUT/write-shm.txt
python3 -c "import torch,triton,zarr,transformers,tensorstore;print(torch.__version__,triton.__version__,zarr.__version__,transformers.__version__)"; lscpu | grep "Model name"
