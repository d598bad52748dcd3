#!/bin/busybox sh
# The guest's first process: the host's root below /host, read-only, and what must be writable in memory.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
while read -r module; do
    insmod "/modules/$module" || echo "guest: the module $module does not load"
done < /modules/order
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro host0 /host
mount -t proc proc /host/proc
mount -t sysfs sysfs /host/sys
mount -t devtmpfs dev /host/dev
mkdir -p /host/dev/shm
for place in dev/shm tmp run; do
    mount -t tmpfs "$place" "/host/$place"
done
ip link set lo up
hostname guest
# 9p over an emulated processor is slow, memory is not.
cp /payload/* /host/tmp/
echo "guest: kernel $(uname -r)"
chroot /host /bin/sh /tmp/run.sh
echo "guest: ended after $(cut -d' ' -f1 /proc/uptime) s"
poweroff -f
