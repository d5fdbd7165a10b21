//! What the decoder accepts and what it refuses, on messages made by hand.

use super::{
    DecodeError, ExternalFiles, NoExternalFiles, decode,
    proto::{
        AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
        SparseTensorProto, StringStringEntryProto, TensorProto, TypeProto, ValueInfoProto,
        attribute_proto::AttributeType, tensor_proto::DataLocation, type_proto,
    },
    tensor,
};
use crate::{ir::Graph, ops::Op};
use bytes::Bytes;
use doyen_tensor::{DType, Tensor};
use half::f16;
use prost::Message;

fn opset(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) }
}

fn value(name: &str, elem_type: i32) -> ValueInfoProto {
    let tensor = type_proto::Tensor { elem_type: Some(elem_type), shape: None };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)) }),
    }
}

fn node(op_type: &str, input: &str, output: &str) -> NodeProto {
    NodeProto {
        op_type: Some(op_type.into()),
        input: vec![input.into()],
        output: vec![output.into()],
        ..NodeProto::default()
    }
}

/// `y = Identity(x)` with changes.
fn model(change: impl FnOnce(&mut ModelProto, &mut GraphProto)) -> ModelProto {
    let mut model =
        ModelProto { ir_version: Some(10), opset_import: vec![opset("", 21)], ..ModelProto::default() };
    let mut graph = GraphProto {
        name: Some("g".into()),
        node: vec![node("Identity", "x", "y")],
        input: vec![value("x", 1)],
        output: vec![value("y", 1)],
        ..GraphProto::default()
    };
    change(&mut model, &mut graph);
    model.graph = Some(graph);
    model
}

fn read(model: &ModelProto, files: &dyn ExternalFiles) -> Result<Graph, DecodeError> {
    decode(Bytes::from(model.encode_to_vec()), files)
}

fn graph(change: impl FnOnce(&mut ModelProto, &mut GraphProto)) -> Graph {
    read(&model(change), &NoExternalFiles).unwrap()
}

#[track_caller]
fn refuses(words: &[&str], change: impl FnOnce(&mut ModelProto, &mut GraphProto)) {
    let message = read(&model(change), &NoExternalFiles).unwrap_err().to_string();
    for word in words {
        assert!(message.contains(word), "{word} is not in: {message}");
    }
}

fn raw(name: &str, dtype: DType, dims: &[i64], bytes: &[u8]) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        data_type: Some(dtype.onnx()),
        dims: dims.to_vec(),
        raw_data: Some(Bytes::copy_from_slice(bytes)),
        ..TensorProto::default()
    }
}

fn attribute(name: &str, kind: AttributeType) -> AttributeProto {
    let mut a = AttributeProto { name: Some(name.into()), ..AttributeProto::default() };
    a.set_type(kind);
    a
}

#[test]
fn versions() {
    refuses(&["ai.onnx", "999", "28"], |m, _| m.opset_import = vec![opset("ai.onnx", 999)]);
    refuses(&["com.microsoft", "version 2"], |m, _| m.opset_import.push(opset("com.microsoft", 2)));
    refuses(&["two versions"], |m, _| m.opset_import.push(opset("ai.onnx", 20)));
    refuses(&["impossible"], |m, _| m.opset_import = vec![opset("", -1)]);
    refuses(&["ONNX IR", "99"], |m, _| m.ir_version = Some(99));
    refuses(&["IR version is 0"], |m, _| m.ir_version = None);
    refuses(&["Identity", "does not import", "ai.onnx"], |m, _| m.opset_import.clear());
    // A domain nobody uses may have any version.
    assert_eq!(graph(|m, _| m.opset_import.push(opset("ai.onnx.ml", 77))).opsets["ai.onnx.ml"], 77);
    assert!(matches!(decode(Bytes::new(), &NoExternalFiles), Err(DecodeError::Model(_))));
    assert!(matches!(
        decode(Bytes::from_static(b"\xff\xff"), &NoExternalFiles),
        Err(DecodeError::Protobuf(_))
    ));
}

#[test]
fn names_are_defined_once() {
    let t = || raw("c", DType::U8, &[1], &[1]);
    refuses(&["\"c\"", "twice"], |_, g| g.initializer = vec![t(), t()]);
    refuses(&["\"x\"", "twice"], |_, g| g.input.push(value("x", 1)));
    refuses(&["\"c\"", "again"], |_, g| {
        g.initializer.push(t());
        g.node.push(node("Identity", "x", "c"));
    });
    refuses(&["needs a name"], |_, g| g.initializer.push(raw("", DType::U8, &[1], &[1])));
    refuses(&["graph output \"ghost\""], |_, g| g.output.push(value("ghost", 1)));
    // An input with an initializer has a default: it is that constant.
    let g = graph(|_, g| {
        g.initializer.push(t());
        g.input.push(value("c", 2));
    });
    assert_eq!(g.inputs.len(), 1);
    refuses(&["graph input \"c\"", "float32", "uint8[1]"], |_, g| {
        g.initializer.push(t());
        g.input.push(value("c", 1));
    });
}

#[test]
fn nodes_get_names_of_their_own() {
    let g = graph(|_, g| {
        g.node = vec![node("Identity", "x", "a"), node("Identity", "a", "b"), node("Identity", "b", "y")];
        g.node[0].name = Some("n".into());
        g.node[1].name = Some("n".into());
    });
    let names: Vec<&str> = g.nodes.iter().map(|n| n.name.as_str()).collect();
    assert_eq!(names, ["n", "/Identity_1", "/Identity_2"]);
}

#[test]
fn operators_are_matched_by_name_whatever_functions_there_are() {
    let function = |domain: &str, name: &str| FunctionProto {
        domain: Some(domain.into()),
        name: Some(name.into()),
        node: vec![node("Identity", "x", "y")],
    };
    let g = graph(|m, g| {
        m.functions = vec![function("", "Identity"), function("mine", "Own")];
        g.node.push(NodeProto { domain: Some("mine".into()), ..node("Own", "y", "z") });
    });
    assert_ne!(g.nodes[0].op, Op::Unknown);
    assert_eq!((&g.nodes[1].op, g.nodes[1].op_name().as_str()), (&Op::Unknown, "mine::Own"));
}

#[test]
fn attributes() {
    let with = |a: AttributeProto| move |_: &mut ModelProto, g: &mut GraphProto| g.node[0].attribute.push(a);
    refuses(&["/Identity_0", "body"], with(attribute("body", AttributeType::Graph)));
    refuses(
        &["reference to a function"],
        with(AttributeProto { ref_attr_name: Some("r".into()), ..attribute("a", AttributeType::Int) }),
    );
    refuses(&["type 99"], with(AttributeProto { r#type: Some(99), ..attribute("a", AttributeType::Int) }));
    refuses(
        &["UTF-8"],
        with(AttributeProto {
            s: Some(Bytes::from_static(b"\xff")),
            ..attribute("a", AttributeType::String)
        }),
    );
    refuses(&["twice"], |_, g| g.node[0].attribute = vec![attribute("a", AttributeType::Int); 2]);
    // Every refusing node is in the message.
    refuses(&["/Identity_0", "/Identity_1"], |_, g| {
        g.node.push(node("Identity", "y", "z"));
        for n in &mut g.node {
            n.attribute.push(attribute("a", AttributeType::Int));
        }
    });
}

#[test]
fn constant_nodes_become_constants() {
    let constant = |a: AttributeProto| {
        move |_: &mut ModelProto, g: &mut GraphProto| {
            g.node.push(NodeProto { attribute: vec![a], input: Vec::new(), ..node("Constant", "", "c") });
        }
    };
    let data = |g: &Graph| g.value(g.find("c").unwrap()).fact.constant.as_ref().unwrap().to_tensor().unwrap();
    let g =
        graph(constant(AttributeProto { ints: vec![3, -1], ..attribute("value_ints", AttributeType::Ints) }));
    assert_eq!(g.nodes.len(), 1);
    assert_eq!(data(&g), Tensor::from_slice([2], &[3i64, -1]).unwrap());
    let g =
        graph(constant(AttributeProto { f: Some(0.5), ..attribute("value_float", AttributeType::Float) }));
    assert_eq!(data(&g), Tensor::scalar(0.5f32));
    let t = raw("", DType::I8, &[2], &[1, 2]);
    let g = graph(constant(AttributeProto { t: Some(t), ..attribute("value", AttributeType::Tensor) }));
    assert_eq!(data(&g), Tensor::from_slice([2], &[1i8, 2]).unwrap());
    refuses(&["Constant", "value_string"], constant(attribute("value_string", AttributeType::String)));
    refuses(&["Constant", "exactly one"], |_, g| g.node.push(node("Constant", "", "c")));
}

#[test]
fn tensors_in_typed_fields() {
    let read = |t: &TensorProto| tensor::decode_tensor(Bytes::from(t.encode_to_vec())).map(|(_, t)| t);
    let ints = |dtype: DType, dims: &[i64], data: &[i32]| TensorProto {
        data_type: Some(dtype.onnx()),
        dims: dims.to_vec(),
        int32_data: data.to_vec(),
        ..TensorProto::default()
    };
    let half = f16::from_f32(1.5);
    let t = read(&ints(DType::F16, &[1], &[i32::from(half.to_bits())])).unwrap();
    assert_eq!(t, Tensor::from_slice([1], &[half]).unwrap());
    // Three 4-bit codes are two bytes.
    assert_eq!(read(&ints(DType::U4, &[3], &[0x21, 0x03])).unwrap().bytes(), [0x21, 0x03]);
    assert_eq!(read(&ints(DType::Bool, &[2], &[0, 1])).unwrap().bytes(), [0, 1]);
    assert_eq!(read(&ints(DType::I8, &[1], &[-3])).unwrap(), Tensor::from_slice([1], &[-3i8]).unwrap());
    assert_eq!(read(&ints(DType::F32, &[0], &[])).unwrap().numel(), 0);
    for (dtype, data) in
        [(DType::I8, 128), (DType::U8, -1), (DType::F16, 65536), (DType::Bool, 2), (DType::I16, 1 << 15)]
    {
        let message = read(&ints(dtype, &[1], &[data])).unwrap_err().to_string();
        assert!(message.contains(&format!("{data} in int32_data does not fit {dtype}")), "{message}");
    }
    let message = read(&ints(DType::F32, &[1], &[1])).unwrap_err().to_string();
    assert!(
        message.contains("1 entries of float_data are needed, found 0 (and 1 in other fields)"),
        "{message}"
    );
    // The extents alone promise a terabyte; nothing is allocated for it.
    let message = read(&ints(DType::I32, &[1 << 40], &[1])).unwrap_err().to_string();
    assert!(message.contains("1099511627776 entries"), "{message}");
    for dims in [&[1 << 62, 4][..], &[-1], &[0, i64::MAX, i64::MAX]] {
        assert!(read(&ints(DType::I32, dims, &[])).is_err(), "{dims:?}");
    }
    let strings = TensorProto { data_type: Some(8), dims: vec![0], ..TensorProto::default() };
    assert!(read(&strings).unwrap_err().to_string().contains("string"));
    let short = read(&raw("t", DType::F32, &[2], &[0; 7])).unwrap_err().to_string();
    assert!(short.contains("needs 8 bytes, found 7"), "{short}");
}

#[test]
fn sparse_tensors_and_other_kinds_of_values_are_refused() {
    refuses(&["\"s\"", "sparse"], |_, g| {
        let values = Some(raw("s", DType::F32, &[1], &[0; 4]));
        g.sparse_initializer.push(SparseTensorProto { values });
    });
    refuses(&["graph input \"q\"", "sequences"], |_, g| {
        let kind = type_proto::Value::SequenceType(type_proto::Sequence::default());
        g.input
            .push(ValueInfoProto { name: Some("q".into()), r#type: Some(TypeProto { value: Some(kind) }) });
    });
    refuses(&["graph input \"s\"", "string"], |_, g| g.input.push(value("s", 8)));
}

struct Data(&'static [u8]);

impl ExternalFiles for Data {
    fn file(&self, location: &str) -> Result<Bytes, String> {
        if location == "data" {
            Ok(Bytes::from_static(self.0))
        } else {
            Err(format!("{location:?} is missing"))
        }
    }
}

fn external(name: &str, dims: &[i64], entries: &[(&str, &str)]) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        data_type: Some(DType::U8.onnx()),
        dims: dims.to_vec(),
        data_location: Some(DataLocation::External as i32),
        external_data: entries
            .iter()
            .map(|(k, v)| StringStringEntryProto { key: Some((*k).into()), value: Some((*v).into()) })
            .collect(),
        ..TensorProto::default()
    }
}

#[test]
fn external_ranges() {
    let files = Data(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let read = |tensors: Vec<TensorProto>| read(&model(|_, g| g.initializer = tensors), &files);
    let at = |name: &str, offset: &str, len: i64| {
        external(name, &[len], &[("location", "data"), ("offset", offset)])
    };
    let g = read(vec![at("a", "0", 4), at("b", "4", 4), at("tied", "4", 4), at("empty", "8", 0)]).unwrap();
    let bytes = |name: &str| {
        g.value(g.find(name).unwrap()).fact.constant.as_ref().unwrap().as_tensor().unwrap().bytes().to_vec()
    };
    assert_eq!((bytes("a"), bytes("tied")), (vec![1, 2, 3, 4], vec![5, 6, 7, 8]));

    let refused = |tensors: Vec<TensorProto>, words: &[&str]| {
        let message = read(tensors).unwrap_err().to_string();
        for word in words {
            assert!(message.contains(word), "{word} is not in: {message}");
        }
    };
    refused(vec![at("a", "0", 4), at("b", "3", 4)], &["\"b\"", "3..7", "overlap", "\"a\"", "0..4"]);
    refused(vec![at("a", "5", 4)], &["\"a\"", "5..9", "has 8", "truncated"]);
    refused(vec![at("a", "18446744073709551615", 4)], &["\"a\"", "overflow"]);
    refused(vec![at("a", "-1", 4)], &["\"a\"", "offset", "-1"]);
    let entries = [("location", "data"), ("length", "5")];
    refused(vec![external("a", &[4], &entries)], &["\"a\"", "uint8[4] needs 4 bytes", "says 5"]);
    refused(vec![external("a", &[4], &[("offset", "0")])], &["\"a\"", "location"]);
    refused(vec![external("a", &[4], &[("location", "other")])], &["\"a\"", "missing"]);
    let both = TensorProto { raw_data: Some(Bytes::from_static(&[1])), ..at("a", "0", 4) };
    refused(vec![both], &["\"a\"", "in the model file and in"]);
}

#[test]
fn raw_tensors_are_slices_of_the_file() {
    let model = model(|_, g| g.initializer.push(raw("c", DType::U8, &[4], &[9, 8, 7, 6])));
    let file = Bytes::from(model.encode_to_vec());
    let g = decode(file.clone(), &NoExternalFiles).unwrap();
    let tensor = g.value(g.find("c").unwrap()).fact.constant.as_ref().unwrap().as_tensor().unwrap();
    let (start, end) = (file.as_ptr() as usize, file.as_ptr() as usize + file.len());
    assert!((start..end).contains(&(tensor.bytes().as_ptr() as usize)));
}
