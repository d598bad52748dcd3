//! The guest: Debian's kernel, and an initramfs with what it needs before the host's root is mounted.
//!
//! Owns: finding the kernel that `cargo xtask test` unpacked, its modules in load order, the archive. Does not own: the
//! programs in the guest (`run.sh`).

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tidemark_tests::daemon::shown;
use tidemark_tests::{machine, process};

const INIT: &str = include_str!("init.sh");
const RUN: &str = include_str!("run.sh");
/// Modules that the guest loads. The host's root comes over 9p on virtio, FUSE is a module, and 9p's file system needs crc32c.
const MODULES: &[&str] = &["virtio_pci", "9pnet_virtio", "9p", "crc32c_generic", "fuse"];
const BUSYBOX: &str = "/bin/busybox";
/// Limit of a tool, which copies or archives 30 MB.
const TOOL_LIMIT: Duration = Duration::from_secs(60);

/// A kernel with the paths of Debian's package: `boot/vmlinuz-VERSION`, `lib/modules/VERSION`.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// Finds the kernel. If it was not unpacked, returns `None` and leaves the test out.
    pub(crate) fn find() -> Option<Self> {
        let root = machine::target_dir().join("tools/guest-kernel");
        let version = fs::read_dir(root.join("boot")).ok().and_then(|entries| {
            entries
                .flatten()
                .find_map(|entry| Some(entry.file_name().to_str()?.strip_prefix("vmlinuz-")?.to_owned()))
        });
        let Some(version) = version else {
            machine::left_out(&format!(
                "no kernel below {}: run `cargo xtask test --only guest`",
                root.display()
            ));
            return None;
        };
        Some(Self {
            image: root.join("boot").join(format!("vmlinuz-{version}")),
            modules: root.join("lib/modules").join(version),
        })
    }

    /// Writes the initramfs into `directory`, with these programs beside the script that runs them.
    pub(crate) fn initramfs(&self, directory: &Path, programs: &[(&str, &Path)]) -> PathBuf {
        let root = directory.join("root");
        for name in ["bin", "modules", "payload", "proc", "sys", "dev", "host"] {
            fs::create_dir_all(root.join(name)).expect("a directory");
        }
        put(&root.join("init"), INIT, 0o755);
        put(&root.join("payload/run.sh"), RUN, 0o644);
        copy(Path::new(BUSYBOX), &root.join("bin/busybox"));
        for (name, program) in programs {
            let mut strip = Command::new("strip");
            tool(strip.arg("-o").arg(root.join("payload").join(name)).arg(program));
        }
        let dependencies = fs::read_to_string(self.modules.join("modules.dep")).expect("modules.dep");
        let order = load_order(&dependencies, MODULES);
        let mut names = String::new();
        for module in &order {
            let name = module.rsplit('/').next().expect("a path has a last part");
            copy(&self.modules.join(module), &root.join("modules").join(name));
            names.push_str(name);
            names.push('\n');
        }
        put(&root.join("modules/order"), &names, 0o644);
        let archive = directory.join("initramfs");
        let script = "find . | cpio --quiet -o -H newc > \"$0\"";
        tool(Command::new("sh").args(["-c", script]).arg(&archive).current_dir(&root));
        archive
    }
}

/// Returns the modules and their dependencies, each module after its dependencies. A line of modules.dep is
/// `module: needs needs`, and the last dependency loads first.
fn load_order(dependencies: &str, wanted: &[&str]) -> Vec<String> {
    let needs: BTreeMap<&str, Vec<&str>> = dependencies
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(module, needs)| (module, needs.split_whitespace().collect()))
        .collect();
    let mut order: Vec<String> = vec![];
    for name in wanted {
        let ending = format!("/{name}.ko");
        let (module, first) = needs
            .iter()
            .find(|(module, _)| module.ends_with(&ending))
            .unwrap_or_else(|| panic!("the kernel has no module {name}"));
        for module in first.iter().rev().chain([module]) {
            if !order.iter().any(|known| known == module) {
                order.push((*module).to_owned());
            }
        }
    }
    order
}

fn put(path: &Path, text: &str, mode: u32) {
    fs::write(path, text).unwrap_or_else(|error| panic!("writing {}: {error}", path.display()));
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("the mode of a file of ours");
}

fn copy(from: &Path, to: &Path) {
    fs::copy(from, to).unwrap_or_else(|error| panic!("copying {}: {error}", from.display()));
}

fn tool(command: &mut Command) {
    let output = process::run(command, TOOL_LIMIT);
    assert!(output.status.success(), "{command:?}: {}", shown(&output));
}

#[test]
fn modules_load_after_what_they_need() {
    let dependencies = "k/a.ko: k/b.ko k/c.ko\nk/b.ko: k/c.ko\nk/c.ko:\nk/d.ko: k/c.ko\n";
    assert_eq!(load_order(dependencies, &["a", "d"]), ["k/c.ko", "k/b.ko", "k/a.ko", "k/d.ko"]);
}
