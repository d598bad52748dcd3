# What the guest is booted for. Lines that begin with `guest:` or `ready:` are for the test on the host.
export TMPDIR=/tmp RUST_BACKTRACE=0 NO_COLOR=1
cd /tmp || exit 1

# A daemon that chooses by itself, as on any machine with such a kernel.
./ckptd up /tmp/ckpt --tier1 256MiB --tier3 file:///tmp/tier3 --state-dir /tmp/state \
    --listen 127.0.0.1:0 --http 127.0.0.1:0 > ready 2> log &
daemon=$!
for _ in $(seq 200); do
    grep -q '^ready:' ready && break
    sleep 0.1
done
cat ready
head -c 20000000 /dev/urandom > saved
mkdir -p /tmp/ckpt/run/step-1 && cp saved /tmp/ckpt/run/step-1/model.pt
cmp saved /tmp/ckpt/run/step-1/model.pt && echo "guest: read back what was saved"
./ckptctl --state-dir /tmp/state flush --wait && echo "guest: committed"
kill "$daemon"
wait "$daemon" && echo "guest: the daemon ended clean" || tail -n 20 log

TIDEMARK_MOUNT_FALLBACK=1 ./mount-suite --color never --test-threads=1 --show-output
