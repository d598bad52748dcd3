//! Plain files: one by itself, parts that say how many they are, and names that carry a rank or only look so.

use super::*;

/// nanoGPT's `ckpt.pt` under `torchrun --nproc 8`, and Lightning's files under DDP: rank 0 writes it, and nobody else writes anything.
#[test]
fn one_file_is_whole_when_its_only_writer_closed_it_however_many_ranks_the_job_has() {
    for name in ["r/ckpt.pt", "r/last.pt", "r/last.ckpt", "r/epoch=0-step=100.ckpt", "r/step1.gguf"] {
        let mut world = World::new(&[(name, 1, writer(1, Some(8)))]);
        assert!(matches!(world.at(5), Verdict::Open { .. }), "{name}");
        assert_eq!(world.evidence(6), Some(Evidence::OneProcess), "{name}");
        world.file(name).writers.push(writer(2, Some(8)));
        assert!(matches!(world.at(99), Verdict::Settled { .. }), "{name}: several ranks write into it");
        world.file(name).writers.truncate(1);
        world.file(name).writers[0].fate = Fate::Failed;
        assert!(matches!(world.at(99), Verdict::Settled { .. }), "{name}: an exception closes files too");
        world.file(name).content = Content::Whole;
        assert_eq!(world.evidence(99), Some(Evidence::OneProcess), "{name}: its bytes say that it is whole");
        world.file(name).state = FileState::Cut;
        world.file(name).content = Content::Unknown;
        assert!(matches!(world.at(99), Verdict::Torn { .. }), "{name}: nobody closed it");
    }
}
