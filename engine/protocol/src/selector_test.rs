//! The grammar of CHECKPOINT and of places on the mount, by example and by property.

use super::*;
use proptest::prelude::*;

fn place(text: &str) -> Place {
    Place::relative(text.as_bytes()).unwrap()
}

#[test]
fn each_form_of_checkpoint_is_told_apart() {
    let cases: [(&[u8], Typed<'_>); 12] = [
        (b"latest", Typed::Latest),
        (b"@latest", Typed::Latest),
        (b"run7@latest", Typed::LatestOf(b"run7")),
        (b"@1200", Typed::Step(1200)),
        (b"run7@1200", Typed::StepOf(b"run7", 1200)),
        (b"a/b@c@7", Typed::StepOf(b"a/b@c", 7)),
        (b"/ckpt/run7@1200", Typed::StepOf(b"/ckpt/run7", 1200)),
        (b"./latest", Typed::At(b"./latest")),
        (b"./run7@1200", Typed::At(b"./run7@1200")),
        (b"run7/step-1200", Typed::At(b"run7/step-1200")),
        (b"me@home/x", Typed::At(b"me@home/x")),
        (b"run\xff@3", Typed::StepOf(b"run\xff", 3)),
    ];
    for (text, typed) in cases {
        assert_eq!(Typed::parse(text), Ok(typed), "{}", String::from_utf8_lossy(text));
    }
    assert_eq!(Typed::parse(b""), Err(SelectorError::Empty));
    assert!(matches!(Typed::parse(b"@99999999999999999999"), Err(SelectorError::StepTooLarge { .. })));
}

#[test]
fn a_path_is_read_as_answers_write_it_and_a_name_that_none_writes_stays() {
    let bytes =
        |text: &[u8]| Place::relative(text).unwrap().unescaped().map(|place| place.as_bytes().to_vec());
    let cases: [(&[u8], &[u8]); 6] = [
        (b"a%FF.csv", b"a\xff.csv"),
        (b"r/100%25/step1.pt", b"r/100%/step1.pt"),
        (b"\xff/a%FE", b"\xff/a\xfe"),
        (b"%41/a%FE", b"%41/a\xfe"),
        (b"%5F/a", b"_/a"),
        (b"%760.1/a", b"v0.1/a"),
    ];
    for (text, expected) in cases {
        assert_eq!(bytes(text).as_deref(), Some(expected), "{}", String::from_utf8_lossy(text));
    }
    for text in [&b""[..], b"r/a", b"r/\xff", b"a%41", b"100%", b"%ff", b"a%2Fb", b"%2E%2E/a", b"a%00"] {
        assert_eq!(bytes(text), None, "{}", String::from_utf8_lossy(text));
    }
}

proptest! {
    #[test]
    fn what_answers_write_of_a_place_is_that_place(bytes in prop::collection::vec(any::<u8>(), 0..24)) {
        if let Ok(place) = Place::relative(&bytes) {
            let text = crate::escape::escape(place.as_bytes());
            let typed = Place::relative(text.as_bytes()).unwrap();
            prop_assert_eq!(typed.unescaped().unwrap_or(typed), place);
        }
    }
}

#[test]
fn typed_paths_land_on_the_mount_or_are_refused() {
    let typed = |cwd: &str, path: &str| Place::typed(b"/ckpt", cwd.as_bytes(), path.as_bytes());
    for (cwd, path, expected) in [
        ("/root", "/ckpt/run7/a", "run7/a"),
        ("/root", "/ckpt", ""),
        ("/root", "/ckpt/", ""),
        ("/root", "../ckpt/run7//a/.", "run7/a"),
        ("/ckpt/run7", "a", "run7/a"),
        ("/ckpt/run7", "../run8", "run8"),
        ("/ckpt", ".", ""),
    ] {
        assert_eq!(typed(cwd, path), Ok(place(expected)), "{cwd} {path}");
    }
    for (cwd, path) in [
        ("/root", "/ckptx/a"),
        ("/root", "/etc"),
        ("/root", "run7"),
        ("/root", "../x"),
        ("/ckpt/run7", "../../x"),
    ] {
        assert!(matches!(typed(cwd, path), Err(PlaceError::Outside { .. })), "{cwd} {path}");
    }
}

#[test]
fn a_mount_on_the_root_holds_every_path() {
    assert_eq!(Place::typed(b"/", b"/root", b"/a/b"), Ok(place("a/b")));
}

#[test]
fn places_on_the_wire_cannot_lead_out_of_the_mount() {
    for bad in [r#""/etc""#, r#""..""#, r#""a/../../b""#, r#""a\u0000b""#, "[46,46]", "[300]"] {
        assert!(serde_json::from_str::<Place>(bad).is_err(), "{bad}");
    }
    let long = format!("\"{}\"", "x".repeat(PATH_BYTES_MAX + 1));
    assert!(serde_json::from_str::<Place>(&long).is_err());
}

proptest! {
    #[test]
    fn every_place_survives_the_wire(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(place) = Place::relative(&bytes) {
            let text = serde_json::to_string(&place).unwrap();
            prop_assert_eq!(serde_json::from_str::<Place>(&text).unwrap(), place.clone());
            prop_assert!(!place.as_bytes().starts_with(b"/"));
            prop_assert!(place.as_bytes().split(|b| *b == b'/').all(|name| name != b".."));
        }
    }

    #[test]
    fn no_text_panics(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        let _ = Typed::parse(&bytes);
        let _ = Place::typed(b"/ckpt", b"/ckpt/x", &bytes);
    }
}

#[test]
fn a_version_is_two_numbers() {
    let number: VersionNumber = "0.12".parse().unwrap();
    assert_eq!((number.timeline, number.version), (Timeline(0), Version(12)));
    assert_eq!(serde_json::to_string(&number).unwrap(), r#""0.12""#);
    assert_eq!(serde_json::from_str::<VersionNumber>(r#""0.12""#).unwrap(), number);
    for none in ["", "1", "0.", ".1", "0.+1", "0.1.2", "v0.1", "0.99999999999999999999"] {
        assert!(none.parse::<VersionNumber>().is_err(), "{none}");
    }
}
